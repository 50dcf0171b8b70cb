// load: an HTTP/1.1 and SSE load generator, single-threaded on epoll; prints one line of JSON.
// Origin: written for Modelyard's first gateway measurements, and this project's own (Apache-2.0, see LICENSE).
// -d takes fractions of a second. Every answer that is not 200 and every stream without [DONE] is counted, never hidden.
//   cc -O2 -o load load.c
//   -m closed  C connections back to back for D seconds              -> req/s, latency
//   -m rate    open loop at R req/s over up to C connections (latency counted from the due time: no coordinated omission)
//   -m stream  C concurrent SSE streams, each restarted when it ends  -> chunks/s, relay latency per chunk, ttft
//   -m hold    opens C streams (ramp R per second), keeps them for D seconds
//   -m slow    opens C streams and never reads (backpressure test)
//   -m abort   opens C streams, closes all after D seconds at once
//   -m once    opens C streams (ramp R per second), each to its end; returns when all ended, or D seconds after the last began
// -a ADDRESS connects from this address (28,000 ports each); -n N counts streams whose tokens were not exactly N ("miscounted").
// -A takes every chunk with content for a token, of engines that write no " t=" (no relay latency then).
// "rejects" are answers of status 429 and 503, with their own latencies; "bad" is all that was not 200, these included.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <unistd.h>
#include <errno.h>
#include <time.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/epoll.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
#define MAXH 64
typedef struct {int fd,busy,inhdr,chunked,status,first,done,first_any; long cl; int cstate; long cleft; uint64_t t0; char hdr[2048]; int hlen; char*ln; int lnn,lncap; int sse; int gotdone; int closehdr; int ntok;} C_;
static int ep,port=8000,nc=32; static double secs=5,rate=1000; static const char*path="/v1/chat/completions",*mode="closed",*key="",*bodyf=0,*body; static char*req; static size_t reqn;
static char xh[4096]; static uint64_t ok,bad,chunks,bytes,connerr,doneok,streams,reconn,trunc_; static int badstatus,expect=-1,anychunk=0; static uint64_t rejects,miscounted,refused; static const char*source=0;
static uint64_t now_us(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return (uint64_t)t.tv_sec*1000000+t.tv_nsec/1000;}
typedef struct {uint64_t b[64*64],n;double sum;uint64_t max;} H; static H hl,ht,hr,hj; // log-linear, 32 sub-buckets/octave
static int hidx(uint64_t v){if(v<64)return v;int e=63-__builtin_clzll(v);return (e-5)*32+(int)((v>>(e-5))-32)+32;}
static uint64_t hval(int i){if(i<64)return i;int e=(i-32)/32+5;return (uint64_t)((i-32)%32+32)<<(e-5);}
static void hadd(H*h,uint64_t v){h->b[hidx(v)]++;h->n++;h->sum+=v;if(v>h->max)h->max=v;}
static double hq(H*h,double q){if(!h->n)return 0;uint64_t t=q*h->n,s=0;for(int i=0;i<64*64;i++){s+=h->b[i];if(s>t)return hval(i);}return h->max;}
static C_*cs; static int *idle,nidle; static uint64_t tstart,tend,t_meas; static uint64_t*due; static long dq_h,dq_t,dq_cap;
static int is_stream;
static void copen(C_*c){
  c->fd=socket(AF_INET,SOCK_STREAM,0);int one=1;setsockopt(c->fd,IPPROTO_TCP,TCP_NODELAY,&one,4);
  if(!strcmp(mode,"slow")){int b=8192;setsockopt(c->fd,SOL_SOCKET,SO_RCVBUF,&b,4);}
  struct sockaddr_in a={.sin_family=AF_INET,.sin_port=htons(port),.sin_addr.s_addr=htonl(INADDR_LOOPBACK)};
  if(source){struct sockaddr_in s={.sin_family=AF_INET,.sin_addr.s_addr=inet_addr(source)};setsockopt(c->fd,IPPROTO_IP,IP_BIND_ADDRESS_NO_PORT,&one,4);bind(c->fd,(void*)&s,sizeof s);}
  if(connect(c->fd,(void*)&a,sizeof a)){connerr++;close(c->fd);c->fd=-1;return;}
  struct epoll_event e={EPOLLIN,{.ptr=c}}; if(strcmp(mode,"slow"))epoll_ctl(ep,EPOLL_CTL_ADD,c->fd,&e);
  c->busy=0;c->hlen=0;
}
static int csend(C_*c,uint64_t t0){
  if(c->fd<0){copen(c);if(c->fd<0)return -1;}
  c->busy=1;c->inhdr=1;c->hlen=0;c->t0=t0;c->first=c->first_any=1;c->sse=0;c->lnn=0;c->gotdone=0;c->closehdr=0;c->ntok=0;
  ssize_t w=send(c->fd,req,reqn,MSG_NOSIGNAL); if(w!=(ssize_t)reqn){connerr++;close(c->fd);c->fd=-1;c->busy=0;return -1;}
  if(is_stream)streams++;
  return 0;
}
static void line(C_*c,char*l,int n,uint64_t now){
  if(n<5||memcmp(l,"data:",5))return;
  if(memmem(l,n,"[DONE]",6)){c->gotdone=1;return;}
  char*t=memmem(l,n," t=",3);
  if(!t&&anychunk){char*q=memmem(l,n,"\"content\":\"",11);if(q&&q+11<l+n&&q[11]!='"')t=q;}
  if(t){ chunks++; c->ntok++; if(c->first){c->first=0;hadd(&ht,now-c->t0);} uint64_t v=0;char*p=t[0]==' '?t+3:t;while(p<l+n&&*p>='0'&&*p<='9')v=v*10+*p++-'0'; if(v&&now>=v)hadd(&hr,now-v); }
}
static void payload(C_*c,char*p,int n,uint64_t now){
  bytes+=n; if(!c->sse)return;
  while(n>0){
    char*nl=memchr(p,'\n',n);
    int k=nl?nl-p:n;
    if(nl&&!c->lnn){line(c,p,k,now);}
    else{ if(c->lnn+k>c->lncap){c->lncap=c->lnn+k+256;c->ln=realloc(c->ln,c->lncap);} memcpy(c->ln+c->lnn,p,k);c->lnn+=k; if(nl){line(c,c->ln,c->lnn,now);c->lnn=0;} }
    if(!nl)break;
    p+=k+1;n-=k+1;
  }
}
static void finish(C_*c,uint64_t now){
  c->busy=0; if(c->status==200){ok++; if(c->sse){if(c->gotdone)doneok++;else trunc_++; if(expect>=0&&c->ntok!=expect)miscounted++;}} else {bad++;badstatus=c->status;if(c->status==429||c->status==503){rejects++;if(now>=t_meas)hadd(&hj,now-c->t0);}}
  if(now>=t_meas&&c->status==200)hadd(&hl,now-c->t0);
  if(c->closehdr){close(c->fd);c->fd=-1;reconn++;}
  idle[nidle++]=c-cs;
}
static void feed(C_*c,char*p,int n,uint64_t now){
  if(c->inhdr){
    int room=sizeof(c->hdr)-1-c->hlen,k=n<room?n:room; int old=c->hlen; memcpy(c->hdr+c->hlen,p,k);c->hlen+=k;c->hdr[c->hlen]=0;
    char*e=strstr(c->hdr,"\r\n\r\n"); if(!e){ if(c->hlen>=(int)sizeof(c->hdr)-1){fprintf(stderr,"hdr too long\n");exit(1);} return;}
    int hl_=e+4-c->hdr; int used=hl_-old; p+=used;n-=used; c->inhdr=0;
    c->status=atoi(c->hdr+9); c->cl=-1;c->chunked=0;c->cstate=0;c->cleft=0;
    for(char*l=c->hdr;l&&l<e;){ if(!strncasecmp(l,"content-length:",15))c->cl=atol(l+15); else if(!strncasecmp(l,"transfer-encoding: chunked",26))c->chunked=1; else if(!strncasecmp(l,"content-type: text/event-stream",31))c->sse=1; else if(!strncasecmp(l,"connection: close",17))c->closehdr=1; l=strchr(l,'\n'); if(l)l++; }
    if(c->cl==0&&!c->chunked){finish(c,now);return;}
    if(c->status!=200&&bad<2){fprintf(stderr,"status %d: %.*s\n",c->status,n<400?n:400,p);}
  }
  if(!c->chunked){ int k=n; if(c->cl>=0&&k>c->cl)k=c->cl; if(n>0)payload(c,p,k,now); if(c->cl>=0){c->cl-=k;if(c->cl<=0)finish(c,now);} return; }
  while(n>0){
    switch(c->cstate){
      case 0:{ // size line
        char ch=*p++;n--; if(ch=='\n'){ if(c->cleft==0)c->cstate=3; else c->cstate=1; } else if(ch>='0'&&ch<='9')c->cleft=c->cleft*16+ch-'0'; else if((ch|32)>='a'&&(ch|32)<='f')c->cleft=c->cleft*16+(ch|32)-'a'+10; break;}
      case 1:{int k=n<c->cleft?n:c->cleft;payload(c,p,k,now);p+=k;n-=k;c->cleft-=k;if(!c->cleft)c->cstate=2;break;}
      case 2:{char ch=*p++;n--;if(ch=='\n'){c->cstate=0;c->cleft=0;}break;}
      case 3:{char ch=*p++;n--;if(ch=='\n'){finish(c,now);return;}break;} // final CRLF (no trailers expected)
    }
  }
}
int main(int ac,char**av){
  int o;while((o=getopt(ac,av,"p:P:c:d:m:r:k:b:H:a:n:A"))!=-1)switch(o){case'A':anychunk=1;break;case'a':source=optarg;break;case'n':expect=atoi(optarg);break;case'p':port=atoi(optarg);break;case'P':path=optarg;break;case'c':nc=atoi(optarg);break;case'd':secs=atof(optarg);break;case'm':mode=optarg;break;case'r':rate=atof(optarg);break;case'k':key=optarg;break;case'b':bodyf=optarg;break;case'H':strcat(xh,optarg);strcat(xh,"\r\n");break;}
  signal(SIGPIPE,SIG_IGN);
  static char bb[1<<20]; if(bodyf){FILE*f=fopen(bodyf,"r");if(!f){perror(bodyf);return 1;} size_t n=fread(bb,1,sizeof bb-1,f);bb[n]=0;fclose(f);body=bb;} else body="{}";
  is_stream=memmem(body,strlen(body),"\"stream\":true",13)||memmem(body,strlen(body),"\"stream\": true",14);
  req=malloc(strlen(body)+8192);char au[512]="";if(*key)sprintf(au,"authorization: Bearer %s\r\n",key);
  reqn=sprintf(req,"POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n%s%saccept: */*\r\nuser-agent: OpenAI/Python 2.8.0\r\nx-stainless-lang: python\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",path,port,au,xh,strlen(body),body);
  ep=epoll_create1(0);cs=calloc(nc,sizeof(C_));idle=malloc(sizeof(int)*(nc+1));
  int open_loop=!strcmp(mode,"rate"),ramp=!strcmp(mode,"hold")||!strcmp(mode,"slow")||!strcmp(mode,"abort")||!strcmp(mode,"once"),once=!strcmp(mode,"once");
  for(int i=nc-1;i>=0;i--){cs[i].fd=-1;if(!ramp){copen(&cs[i]);if(cs[i].fd<0){}idle[nidle++]=i;}}
  tstart=now_us();tend=tstart+(uint64_t)(secs*1000000);t_meas=open_loop?tstart+(tend-tstart)/5:tstart;
  dq_cap=1<<22;due=malloc(dq_cap*8);
  uint64_t nextdue=tstart; double step=1e6/rate; double nd=tstart; int opened=0; uint64_t t_up=0; int phase=0;
  if(ramp)tend=UINT64_MAX;
  static struct epoll_event ev[512];static char buf[262144]; uint64_t rng=88172645463325252ull; long drops=0;
  for(;;){
    uint64_t now=now_us(); if(now>=tend)break; if(once&&phase==1&&nidle+(int)refused>=nc)break;
    if(open_loop){
      while(nextdue<=now){ due[dq_t++%dq_cap]=nextdue; rng^=rng<<13;rng^=rng>>7;rng^=rng<<17; double u=(rng>>11)*(1.0/9007199254740992.0); nd+=step*(0.5+u); nextdue=nd; } // jittered uniform arrivals
      while(dq_h<dq_t&&nidle){ int i=idle[--nidle]; uint64_t t=due[dq_h%dq_cap]; if(csend(&cs[i],t)){idle[nidle++]=i;drops++;dq_h++;break;} dq_h++; }
    } else if(ramp){
      while(phase==0&&opened<nc&&now>=tstart+(uint64_t)(opened*1e6/rate)){if(csend(&cs[opened],now))refused++;opened++;}
      if(phase==0&&opened==nc){phase=1;t_up=now;tend=now+(uint64_t)(secs*1000000); }
    } else { int k=nidle; while(k-->0){int i=idle[--nidle]; if(csend(&cs[i],now)){ idle[nidle++]=i; if(connerr>1000){fprintf(stderr,"too many connect errors\n");return 1;} break;} } }
    uint64_t lim=tend; if(open_loop&&nextdue<lim&&nidle)lim=nextdue; if(open_loop&&!nidle&&nextdue<lim)lim=nextdue; if(ramp&&phase==0)lim=tstart+(uint64_t)(opened*1e6/rate);
    now=now_us(); uint64_t w=lim>now?lim-now:0; if(w>200000)w=200000; struct timespec ts={w/1000000,(w%1000000)*1000};
    int n=epoll_pwait2(ep,ev,512,&ts,NULL); now=now_us();
    for(int i=0;i<n;i++){ C_*c=ev[i].data.ptr; if(c->fd<0)continue; ssize_t r=recv(c->fd,buf,sizeof buf,MSG_DONTWAIT);
      if(r<0&&errno==EAGAIN)continue;
      if(r<=0){ close(c->fd);c->fd=-1; if(c->busy){ if(!c->inhdr&&!c->chunked&&c->cl<0){finish(c,now);} else {bad++;badstatus=-1;c->busy=0;idle[nidle++]=c-cs;} } else reconn++; continue;}
      feed(c,buf,r,now_us()); }
  }
  double el=(now_us()-tstart)/1e6; if(ramp)el=(now_us()-t_up)/1e6;
  int live=0,started=0,busy=0;for(int i=0;i<nc;i++){if(cs[i].busy)busy++;if(cs[i].fd>=0)live++;if(cs[i].busy&&!cs[i].first)started++;}
  printf("{\"mode\":\"%s\",\"conns\":%d,\"secs\":%.2f,\"ok\":%lu,\"bad\":%lu,\"badstatus\":%d,\"connerr\":%lu,\"reconn\":%lu,\"rps\":%.1f,\"p50\":%.0f,\"p90\":%.0f,\"p99\":%.0f,\"p999\":%.0f,\"max\":%lu,\"unsent\":%ld,\"streams\":%lu,\"done_ok\":%lu,\"truncated\":%lu,\"chunks\":%lu,\"chunks_s\":%.0f,\"mb_s\":%.2f,\"ttft_p50\":%.0f,\"ttft_p99\":%.0f,\"relay_p50\":%.0f,\"relay_p99\":%.0f,\"relay_max\":%lu,\"live\":%d,\"started\":%d,\"rejects\":%lu,\"reject_p50\":%.0f,\"reject_p99\":%.0f,\"reject_max\":%lu,\"miscounted\":%lu,\"unfinished\":%d}\n",
   mode,nc,el,ok,bad,badstatus,connerr,reconn,ok/el,hq(&hl,.5),hq(&hl,.9),hq(&hl,.99),hq(&hl,.999),hl.max,dq_t-dq_h+drops,streams,doneok,trunc_,chunks,chunks/el,bytes/el/1e6,hq(&ht,.5),hq(&ht,.99),hq(&hr,.5),hq(&hr,.99),hr.max,live,started,rejects,hq(&hj,.5),hq(&hj,.99),hj.max,miscounted,busy);
  return 0;
}
