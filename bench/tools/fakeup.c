// fakeup: a fake OpenAI-compatible engine at C speed, single-threaded on epoll; the upstream of bench/gateway.
// Origin: written for Modelyard's first gateway measurements, and this project's own (Apache-2.0, see LICENSE).
// Its answers are canned on purpose, so that it costs far less than any gateway before it; it is never used in tests.
//   cc -O2 -o fakeup fakeup.c ; ./fakeup -p 9001 [-n tokens] [-i interval_us] [-d delay_us]
// POST anything  -> canned chat completion (JSON), or SSE when the body has "stream":true
// GET /ctl?n=&i=&d=  -> sets tokens/stream, token interval (0 = flat out), non-stream delay; returns counters
// Every content chunk carries " t=<16-digit CLOCK_MONOTONIC ns/1000>" so that the load tool can compute relay latency.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <unistd.h>
#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/epoll.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>

typedef struct conn {
  int fd, streaming, left, seq, queued, delayed; uint64_t due;
  char *in; size_t inlen, incap; char *out; size_t outlen, outoff, outcap;
  struct conn *next, *prev; int want_out;
} conn;
static int ep, ntok=100, port=9001; static long ival=20000, delay_us=0;
static uint64_t n_req, n_stream, n_done, n_abort, n_chunks, n_conn, n_active, n_accept;
static uint64_t now_us(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return (uint64_t)t.tv_sec*1000000+t.tv_nsec/1000;}
typedef struct {conn *h,*t;} q_t; static q_t sq, dq;
static conn *graveyard;
static void q_push(q_t*q,conn*c){c->next=0;c->prev=q->t;if(q->t)q->t->next=c;else q->h=c;q->t=c;c->queued=1;}
static void q_del(q_t*q,conn*c){if(c->prev)c->prev->next=c->next;else q->h=c->next;if(c->next)c->next->prev=c->prev;else q->t=c->prev;c->next=c->prev=0;c->queued=0;}
static void conn_close(conn*c){
  if(c->queued)q_del(c->delayed?&dq:&sq,c);
  if(c->streaming){n_abort++;n_active--;} else if(c->delayed)n_abort++;
  close(c->fd);c->fd=-1;free(c->in);free(c->out);c->in=c->out=0;n_conn--;
  c->next=graveyard;graveyard=c;
}
static int conn_write(conn*c,const char*b,size_t n){
  if(c->outlen==c->outoff){
    ssize_t w=send(c->fd,b,n,MSG_NOSIGNAL);
    if(w<0){ if(errno!=EAGAIN){conn_close(c);return -1;} w=0; }
    if((size_t)w==n)return 0;
    b+=w;n-=w;c->outlen=c->outoff=0;
  }
  if(c->outlen+n>c->outcap){c->outcap=(c->outlen+n)*2;c->out=realloc(c->out,c->outcap);}
  memcpy(c->out+c->outlen,b,n);c->outlen+=n;
  if(!c->want_out){struct epoll_event e={EPOLLIN|EPOLLOUT|EPOLLRDHUP,{.ptr=c}};epoll_ctl(ep,EPOLL_CTL_MOD,c->fd,&e);c->want_out=1;}
  return 1;
}
static char JSONR[2048]; static size_t JSONRn;
static char CH[1024],TAIL[2048],HEAD[512],FIRST[1024]; static size_t CHn,TAILn,HEADn,FIRSTn; static int CHt;
static size_t mkchunk(char*o,const char*p){size_t n=strlen(p);return sprintf(o,"%zx\r\n%s\r\n",n,p);}
static void setup(void){
  const char*body="{\"id\":\"chatcmpl-fake000000000000\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"fake-model\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Quantum computing uses qubits, which can be in a superposition of zero and one, so that some problems can be solved with far fewer steps than on a classical machine. Entanglement links qubits so that measuring one tells about another.\",\"refusal\":null,\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":28,\"total_tokens\":76,\"completion_tokens\":48},\"prompt_logprobs\":null}";
  JSONRn=sprintf(JSONR,"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 15:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: application/json\r\n\r\n%s",strlen(body),body);
  HEADn=sprintf(HEAD,"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 15:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n");
  FIRSTn=mkchunk(FIRST,"data: {\"id\":\"chatcmpl-fake000000000000\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"fake-model\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
  CHn=mkchunk(CH,"data: {\"id\":\"chatcmpl-fake000000000000\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"fake-model\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" t=0000000000000000\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
  CHt=strstr(CH," t=0")-CH+3;
  char*o=TAIL;
  o+=mkchunk(o,"data: {\"id\":\"chatcmpl-fake000000000000\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"fake-model\",\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n");
  char u[512];sprintf(u,"data: {\"id\":\"chatcmpl-fake000000000000\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"fake-model\",\"choices\":[],\"usage\":{\"prompt_tokens\":28,\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n",28+ntok,ntok);
  o+=mkchunk(o,u); o+=mkchunk(o,"data: [DONE]\n\n"); o+=sprintf(o,"0\r\n\r\n"); TAILn=o-TAIL;
}
static void stamp(uint64_t t){char*p=CH+CHt+15;for(int i=0;i<16;i++){*p--='0'+t%10;t/=10;}}
static int emit(conn*c,uint64_t now){ // one token
  if(c->left>0){stamp(now);c->left--;n_chunks++;return conn_write(c,CH,CHn);}
  c->streaming=0;n_active--;n_done++;return conn_write(c,TAIL,TAILn);
}
static void reply(conn*c,const char*ct,const char*b){char o[8192];size_t n=snprintf(o,sizeof o,"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s",ct,strlen(b),b);conn_write(c,o,n);}
static const char*memmem2(const char*h,size_t hn,const char*n){return memmem(h,hn,n,strlen(n));}
static void handle(conn*c,char*hdr,size_t hn,char*body,size_t bn){
  if(hdr[0]=='G'){
    char path[256]={0};sscanf(hdr,"GET %255s",path);
    if(!strncmp(path,"/ctl",4)){
      char*p;int ch=0;
      if((p=strstr(path,"n="))){ntok=atoi(p+2);ch=1;} if((p=strstr(path,"i="))){ival=atol(p+2);} if((p=strstr(path,"d="))){delay_us=atol(p+2);}
      if(ch)setup();
      char o[512];sprintf(o,"{\"requests\":%lu,\"streams\":%lu,\"done\":%lu,\"aborted\":%lu,\"chunks\":%lu,\"conns\":%lu,\"active\":%lu,\"accepted\":%lu,\"tokens\":%d,\"interval_us\":%ld}\n",n_req,n_stream,n_done,n_abort,n_chunks,n_conn,n_active,n_accept,ntok,ival);
      reply(c,"application/json",o);return;
    }
    if(!strncmp(path,"/v1/models",10)){reply(c,"application/json","{\"object\":\"list\",\"data\":[{\"id\":\"fake-model\",\"object\":\"model\",\"created\":1760000000,\"owned_by\":\"vllm\",\"root\":\"fake-model\",\"parent\":null,\"max_model_len\":32768,\"permission\":[]}]}");return;}
    if(strstr(path,"metrics")){reply(c,"text/plain","vllm:num_requests_running{model_name=\"fake-model\"} 0\nvllm:num_requests_waiting{model_name=\"fake-model\"} 0\n");return;}
    if(strstr(path,"version")){reply(c,"application/json","{\"version\":\"0.11.0\"}");return;}
    reply(c,"application/json","{\"status\":\"ok\",\"model_path\":\"fake-model\",\"served_model_name\":\"fake-model\",\"model_id\":\"fake-model\",\"tokenizer_path\":\"fake-model\",\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"max_total_num_tokens\":100000,\"version\":\"0.5.0\"}");return;
  }
  n_req++;
  int st = memmem2(body,bn,"\"stream\":true")||memmem2(body,bn,"\"stream\": true");
  if(!st){ if(delay_us>0){c->delayed=1;c->due=now_us()+delay_us;q_push(&dq,c);} else conn_write(c,JSONR,JSONRn); return; }
  n_stream++;n_active++;c->streaming=1;c->left=ntok;c->seq=0;
  char b[2048];memcpy(b,HEAD,HEADn);memcpy(b+HEADn,FIRST,FIRSTn);
  if(conn_write(c,b,HEADn+FIRSTn)<0)return;
  c->due=now_us()+ival;q_push(&sq,c);
}
static void parse(conn*c){
  for(;;){
    if(c->fd<0||c->streaming||c->delayed||!c->inlen)return;
    char*e=memmem(c->in,c->inlen,"\r\n\r\n",4); if(!e)return;
    size_t hn=e+4-c->in; size_t cl=0; int chunked=0;
    for(char*l=c->in;l<e;){char*nl=memchr(l,'\n',c->in+hn-l);if(!nl)break;
      if(!strncasecmp(l,"content-length:",15))cl=atol(l+15); else if(!strncasecmp(l,"transfer-encoding:",18))chunked=1; else if(!strncasecmp(l,"expect:",7)){} l=nl+1;}
    char*body=c->in+hn; size_t bn=cl, used;
    if(chunked){char*z=memmem(body,c->inlen-hn,"0\r\n\r\n",5);if(!z)return;bn=z-body;used=hn+bn+5;}
    else { if(c->inlen<hn+cl)return; used=hn+cl; }
    handle(c,c->in,hn,body,bn);
    if(c->fd<0)return;
    memmove(c->in,c->in+used,c->inlen-used);c->inlen-=used;
  }
}
int main(int ac,char**av){
  int o;while((o=getopt(ac,av,"p:n:i:d:"))!=-1){if(o=='p')port=atoi(optarg);if(o=='n')ntok=atoi(optarg);if(o=='i')ival=atol(optarg);if(o=='d')delay_us=atol(optarg);}
  setup();signal(SIGPIPE,SIG_IGN);
  int ls=socket(AF_INET,SOCK_STREAM|SOCK_NONBLOCK,0);int one=1;setsockopt(ls,SOL_SOCKET,SO_REUSEADDR,&one,4);setsockopt(ls,SOL_SOCKET,SO_REUSEPORT,&one,4);
  struct sockaddr_in a={.sin_family=AF_INET,.sin_port=htons(port),.sin_addr.s_addr=htonl(INADDR_LOOPBACK)};
  if(bind(ls,(void*)&a,sizeof a)||listen(ls,4096)){perror("bind");return 1;}
  ep=epoll_create1(0);struct epoll_event e={EPOLLIN,{.ptr=0}};epoll_ctl(ep,EPOLL_CTL_ADD,ls,&e);
  static struct epoll_event ev[512]; static char buf[65536];
  for(;;){
    int to=-1; uint64_t now=now_us();
    if(sq.h){ if(ival==0||sq.h->due<=now)to=0; else to=(int)((sq.h->due-now+999)/1000);}
    if(dq.h){ int t2=dq.h->due<=now?0:(int)((dq.h->due-now+999)/1000); if(to<0||t2<to)to=t2; }
    struct timespec ts; uint64_t nxt=UINT64_MAX; if(sq.h)nxt=ival==0?now:sq.h->due; if(dq.h&&dq.h->due<nxt)nxt=dq.h->due;
    if(to>=0){uint64_t w=nxt>now?nxt-now:0;ts.tv_sec=w/1000000;ts.tv_nsec=(w%1000000)*1000;}
    int n=epoll_pwait2(ep,ev,512,to<0?NULL:&ts,NULL);
    for(int i=0;i<n;i++){
      conn*c=ev[i].data.ptr;
      if(!c){ for(;;){int fd=accept4(ls,0,0,SOCK_NONBLOCK);if(fd<0)break;setsockopt(fd,IPPROTO_TCP,TCP_NODELAY,&one,4);c=calloc(1,sizeof*c);c->fd=fd;n_conn++;n_accept++;struct epoll_event x={EPOLLIN|EPOLLRDHUP,{.ptr=c}};epoll_ctl(ep,EPOLL_CTL_ADD,fd,&x);} continue; }
      if(c->fd<0)continue;
      if(ev[i].events&EPOLLOUT){
        ssize_t w=send(c->fd,c->out+c->outoff,c->outlen-c->outoff,MSG_NOSIGNAL);
        if(w<0&&errno!=EAGAIN){conn_close(c);continue;}
        if(w>0)c->outoff+=w;
        if(c->outoff==c->outlen){c->outoff=c->outlen=0;struct epoll_event x={EPOLLIN|EPOLLRDHUP,{.ptr=c}};epoll_ctl(ep,EPOLL_CTL_MOD,c->fd,&x);c->want_out=0;
          if(c->streaming&&!c->queued){c->due=now_us()+ival;q_push(&sq,c);} }
      }
      if(ev[i].events&(EPOLLIN|EPOLLRDHUP|EPOLLHUP|EPOLLERR)){
        ssize_t r=recv(c->fd,buf,sizeof buf,0);
        if(r==0||(r<0&&errno!=EAGAIN)){conn_close(c);continue;}
        if(r>0){ if(c->inlen+r>c->incap){c->incap=(c->inlen+r)*2;c->in=realloc(c->in,c->incap);} memcpy(c->in+c->inlen,buf,r);c->inlen+=r; parse(c);}
      }
    }
    now=now_us();
    while(dq.h&&dq.h->due<=now){conn*c=dq.h;q_del(&dq,c);c->delayed=0;if(conn_write(c,JSONR,JSONRn)>=0)parse(c);}
    int budget=ival==0?256:1000000;
    while(sq.h&&budget-->0&&(ival==0||sq.h->due<=now)){
      conn*c=sq.h;q_del(&sq,c);
      if(ival==0||(budget&63)==0)now=now_us();
      int r=emit(c,now_us());
      if(r<0)continue;
      if(!c->streaming){parse(c);continue;}
      if(r==0){c->due+=ival; if(c->due+ival<now)c->due=now+ival; q_push(&sq,c);} // r==1: blocked, requeued on EPOLLOUT
    }
    while(graveyard){conn*c=graveyard;graveyard=c->next;free(c);}
  }
}
