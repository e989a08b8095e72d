import sys, importlib.abc, importlib.machinery, types
from unittest.mock import MagicMock
class Mod(types.ModuleType):
    __path__=[]
    def __getattr__(self,n):
        if n.startswith("__"): raise AttributeError(n)
        if n=="get_tokenizer": return lambda *a,**k: Tok()
        v=MagicMock(name=n) if not n[:1].isupper() else type(n,(Exception if n.endswith(("Error","Exception")) else object,),{"__init__":lambda s,*a,**k:None})
        setattr(self,n,v); return v
class Tok:
    def _p(self,path,body):
        import requests
        from tests.utils import RemoteOpenAIServer as R
        return requests.post(R.last.url_root+path,json=body).json()
    def decode(self,ids,skip_special_tokens=False): return self._p("/detokenize",{"tokens":list(ids)})["content"]
    def encode(self,text,add_special_tokens=True): return self._p("/tokenize",{"content":text,"add_special":add_special_tokens})["tokens"]
    def __call__(self,text,add_special_tokens=True,**k):
        return types.SimpleNamespace(input_ids=self.encode(text,add_special_tokens))
    def apply_chat_template(self,conversation=None,messages=None,add_generation_prompt=False,tokenize=True,tools=None,**k):
        b={"messages":conversation or messages,"add_generation_prompt":add_generation_prompt}
        if tools:b["tools"]=tools
        t=self._p("/apply-template",b)["prompt"]
        return self.encode(t) if tokenize else t
    def __getattr__(self,n): raise AttributeError(n)
class F(importlib.abc.MetaPathFinder,importlib.abc.Loader):
    def find_spec(self,name,path,target=None):
        if name.split(".")[0] in ("vllm","torch","transformers","vllm_test_utils","openai_harmony","pybase64","soundfile","librosa","safetensors","mteb","PIL","cohere","xgrammar","tblib","lm_eval","schemathesis","grpc","fastapi","mcp","cbor2","msgspec","partial_json_parser"):
            return importlib.machinery.ModuleSpec(name,self,is_package=True)
    def create_module(self,spec): return Mod(spec.name)
    def exec_module(self,m): pass
sys.meta_path.append(F())
