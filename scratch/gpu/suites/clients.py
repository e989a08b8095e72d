import sys, traceback, json
from pydantic import BaseModel
from typing import Literal
import openai
U=sys.argv[1]; M="smollm2-135m"
def run(name,f):
    try: print("ok  ",name,repr(f())[:110])
    except Exception as e: print("FAIL",name,type(e).__name__,str(e)[:300].replace("\n"," "))
class P(BaseModel):
    name: str
    age: int
oc=openai.OpenAI(base_url=U+"/v1",api_key="x",max_retries=0)
import instructor
for mode in (instructor.Mode.TOOLS,instructor.Mode.JSON,instructor.Mode.JSON_SCHEMA,instructor.Mode.MD_JSON,instructor.Mode.TOOLS_STRICT):
    def f(mode=mode):
        c=instructor.from_openai(oc,mode=mode)
        return c.chat.completions.create(model=M,messages=[{"role":"user","content":"John is 25 years old"}],response_model=P,max_retries=1,temperature=0,max_tokens=100)
    run(f"instructor {mode}",f)
def f():
    c=instructor.from_openai(oc,mode=instructor.Mode.TOOLS)
    return list(c.chat.completions.create_partial(model=M,messages=[{"role":"user","content":"John is 25"}],response_model=P,max_tokens=100,temperature=0))[-1]
run("instructor partial",f)
import outlines
for how in ("from_openai","from_vllm","from_sglang"):
    m=getattr(outlines,how)(oc,M)
    run(how+" text",lambda: m("Say hi",max_tokens=8))
    run(how+" literal",lambda: m("yes or no?",Literal["yes","no"],max_tokens=8))
    run(how+" model",lambda: m("John is 25",P,max_tokens=80))
    from outlines.types import Regex, CFG
    run(how+" regex",lambda: m("phone",Regex(r"\d{3}-\d{4}"),max_tokens=20))
    run(how+" cfg",lambda: m("x",CFG('root ::= "a" | "b"'),max_tokens=8))
    run(how+" stream",lambda: "".join(m.stream("Say hi",max_tokens=8)))
    run(how+" list",lambda: m("John is 25",list[int],max_tokens=30))
import litellm
litellm.suppress_debug_info=True
kw=dict(api_base=U+"/v1",api_key="x",max_tokens=16)
for prov in ("openai/","hosted_vllm/","lm_studio/","llamafile/","custom_openai/"):
    run("litellm "+prov,lambda: litellm.completion(model=prov+M,messages=[{"role":"user","content":"Hi"}],**kw).choices[0].message.content)
    run("litellm stream "+prov,lambda: "".join(c.choices[0].delta.content or "" for c in litellm.completion(model=prov+M,messages=[{"role":"user","content":"Hi"}],stream=True,stream_options={"include_usage":True},**kw)))
run("litellm schema",lambda: litellm.completion(model="hosted_vllm/"+M,messages=[{"role":"user","content":"John is 25"}],response_format=P,**{**kw,"max_tokens":80}).choices[0].message.content)
run("litellm text",lambda: litellm.text_completion(model="text-completion-openai/"+M,prompt=["a","b"],logprobs=2,**kw).choices[1])
run("litellm emb",lambda: litellm.embedding(model="openai/"+M,input=["a","b"],api_base=U+"/v1",api_key="x").usage)
run("litellm emb vllm",lambda: litellm.embedding(model="hosted_vllm/"+M,input=["a","b"],api_base=U+"/v1",api_key="x").usage)
run("litellm responses",lambda: litellm.responses(model="openai/"+M,input="Hi",max_output_tokens=16,api_base=U+"/v1",api_key="x").output[0])
tool=[{"type":"function","function":{"name":"add","parameters":{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}}}]
run("litellm tools",lambda: litellm.completion(model="hosted_vllm/"+M,messages=[{"role":"user","content":"Hi"}],tools=tool,tool_choice="required",**kw).choices[0].message.tool_calls)
run("litellm tools none",lambda: litellm.completion(model="openai/"+M,messages=[{"role":"user","content":"Hi"}],tools=tool,tool_choice="none",**kw).choices[0].message.content)
run("litellm rerank",lambda: litellm.rerank(model="hosted_vllm/"+M,query="a",documents=["b"],api_base=U,api_key="x"))
import asyncio
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
a=Agent(OpenAIChatModel(M,provider=OpenAIProvider(base_url=U+"/v1",api_key="x")),model_settings={"max_tokens":100,"temperature":0})
run("pydantic-ai",lambda: a.run_sync("Hi").output)
a2=Agent(OpenAIChatModel(M,provider=OpenAIProvider(base_url=U+"/v1",api_key="x")),output_type=P,model_settings={"max_tokens":100,"temperature":0})
run("pydantic-ai typed",lambda: a2.run_sync("John is 25").output)
try:
    from guidance import models, gen
    run("guidance",lambda: str(models.OpenAI(M,base_url=U+"/v1",api_key="x")))
except Exception as e: print("guidance",e)
