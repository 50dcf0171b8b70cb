/* libnvidia-ml.so.1 as its API reference documents it, of a machine that FAKE_GPUS describes:
 * "name,total MiB,used MiB,island,mig;…". Real bindings load it, so that what we call is checked up to the driver. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char name[96]; unsigned long long total, used; int island, mig; } gpu;
typedef struct { unsigned long long total, free, used; } memory;
static gpu gpus[64];
static int count, is_begun;

static void read_all(void) {
    char text[4096], *save = NULL;
    count = 0;
    snprintf(text, sizeof text, "%s", getenv("FAKE_GPUS") ? getenv("FAKE_GPUS") : "");
    for (char *row = strtok_r(text, ";", &save); row && count < 64; row = strtok_r(NULL, ";", &save)) {
        gpu *one = &gpus[count];
        if (sscanf(row, "%95[^,],%llu,%llu,%d,%d", one->name, &one->total, &one->used, &one->island, &one->mig) == 5) count++;
    }
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (getenv("FAKE_INIT")) return atoi(getenv("FAKE_INIT"));
    read_all();
    is_begun++;
    return 0;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return is_begun-- > 0 ? 0 : 1; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : code == 3 ? "Not Supported" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *found) { *found = (unsigned)count; return is_begun ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= (unsigned)count) return 2;
    *handle = &gpus[index];
    return 0;
}
int nvmlDeviceGetName(gpu *one, char *name, unsigned size) { snprintf(name, size, "%s", one->name); return 0; }
int nvmlDeviceGetMemoryInfo(gpu *one, memory *found) {
    found->total = one->total << 20;
    found->used = one->used << 20;
    found->free = found->total - found->used;
    return 0;
}
int nvmlDeviceGetMigMode(gpu *one, unsigned *now, unsigned *pending) {
    if (one->mig < 0) return 3;
    *now = *pending = (unsigned)one->mig;
    return 0;
}
int nvmlDeviceGetP2PStatus(gpu *one, gpu *other, int capability, int *status) {
    if (one->island < 0) return 3;
    *status = capability == 2 && one->island == other->island ? 0 : 5;
    return 0;
}
