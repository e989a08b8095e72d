"""Starts graphrt serve in place of vLLM."""
import atexit, os, re, subprocess, threading, json
import openai
REAL=os.environ.get("SU_MODEL","smollm2-135m")
VLLM_PATH="/nowhere"
class RemoteOpenAIServer:
    DUMMY_API_KEY="token-abc123"
    def __init__(self, model, args=(), *, env_dict=None, seed=0, auto_port=True, max_wait_seconds=None, override_hf_configs=None, **kw):
        out=[]; names=[model]; ctx="2048"; args=[str(a) for a in args]; i=0
        while i<len(args):
            a=args[i]
            if a=="--max-model-len": ctx=args[i+1]
            if a=="--served-model-name": names=[args[i+1]]
            if a=="--lora-modules":
                j=i+1
                while j<len(args) and not args[j].startswith("--"):
                    names.append(args[j].split("=")[0]); j+=1
            if a=="--api-key": out+=["--api-key",args[i+1]]
            i+=1
        cmd=["/work/main/.venv/bin/python","-m","graphrt","serve",REAL,"--backend","cpu","-t","2","--port","0","-np","8","-c",ctx,"--alias",",".join(names), *(["--pooling","mean"] if 1 else []),*out]
        self.proc=subprocess.Popen(cmd,env={**os.environ,"PYTHONPATH":os.environ.get("SU_TREE","/tmp/su/base")},stderr=subprocess.PIPE,text=True)
        self.log=[]
        for line in self.proc.stderr:
            self.log.append(line)
            m=re.search(r"served at http://([0-9.]+):([0-9]+)",line)
            if m: break
        else: raise RuntimeError("".join(self.log))
        self.host,self.port=m[1],int(m[2])
        threading.Thread(target=lambda:[self.log.append(l) for l in self.proc.stderr],daemon=True).start()
        RemoteOpenAIServer.last=self
    def __enter__(self): return self
    def __exit__(self,*a): self.proc.kill(); self.proc.wait()
    @property
    def url_root(self): return f"http://{self.host}:{self.port}"
    def url_for(self,*p): return self.url_root+"/"+"/".join(p)
    def get_client(self,**kw):
        kw.setdefault("timeout",600)
        return openai.OpenAI(base_url=self.url_for("v1"),api_key=self.DUMMY_API_KEY,max_retries=0,**kw)
    def get_async_client(self,**kw):
        kw.setdefault("timeout",600)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"),api_key=self.DUMMY_API_KEY,max_retries=0,**kw)
RemoteVLLMServer=RemoteOpenAIServer
def __getattr__(n):
    from unittest.mock import MagicMock
    if n.startswith("__"): raise AttributeError(n)
    return MagicMock()
