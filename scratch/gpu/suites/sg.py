# SGLang's test_openai_server.py, test_matched_stop.py, test_ignore_eos, continuous usage: the same requests and asserts
import sys, json, openai, requests
U=sys.argv[1]; M="tiny"; c=openai.Client(api_key="x",base_url=U+"/v1",max_retries=0)
tok=lambda t: requests.post(U+"/tokenize",json={"content":t,"add_special":True}).json()["tokens"]
n=bad=0
def run(name,f):
    global n,bad; n+=1
    try: f()
    except Exception as e: bad+=1; print("FAIL",name,type(e).__name__,str(e)[:160])
P="The capital of France is"
def comp(echo,lp,lst,k,ids,stream):
    p=tok(P) if ids else P; np=len(tok(P))*(2 if lst else 1); arg=[p,p] if lst else p; nc=2 if lst else 1
    kw=dict(model=M,prompt=arg,temperature=0,max_tokens=32,echo=echo,logprobs=lp,n=k)
    if not stream:
        r=c.completions.create(**kw); assert len(r.choices)==nc*k
        if echo: assert r.choices[0].text.startswith(P)
        if lp:
            L=r.choices[0].logprobs; assert L and isinstance(L.tokens[0],str) and isinstance(L.top_logprobs[1],dict) and len(L.top_logprobs[1])>0
            if not echo: assert L.token_logprobs[0]
        assert r.id and r.created and r.usage.prompt_tokens==np and r.usage.completion_tokens>0 and r.usage.total_tokens>0
        return
    first={}
    for r in c.completions.create(**kw,stream=True,stream_options={"include_usage":True}):
        if r.usage is not None:
            assert r.usage.prompt_tokens>0 and r.usage.completion_tokens>0; continue
        ch=r.choices[0]; i=ch.index; f=first.get(i,True)
        if lp:
            assert ch.logprobs and isinstance(ch.logprobs.tokens[0],str)
            if not (f and echo): assert isinstance(ch.logprobs.top_logprobs[0],dict) and len(ch.logprobs.top_logprobs[0])>0
        if f:
            if echo: assert ch.text.startswith(P)
            first[i]=False
        assert r.id and r.created
    assert all(not first.get(i,True) for i in range(nc*k))
for stream in (False,True):
  for echo in (False,True):
    for lp in (None,5):
      for lst in (True,False):
        for k in (1,2):
          for ids in (False,True):
            run(f"completion {stream,echo,lp,lst,k,ids}",lambda: comp(echo,lp,lst,k,ids,stream))
def chat(lp,k,stream):
    kw=dict(model=M,messages=[{"role":"system","content":"You are a helpful AI assistant"},{"role":"user","content":"What is the capital of France?"}],temperature=0,logprobs=lp is not None and lp>0,top_logprobs=lp,n=k,max_tokens=24)
    if not stream:
        r=c.chat.completions.create(**kw)
        if lp: assert isinstance(r.choices[0].logprobs.content[0].top_logprobs[0].token,str) and len(r.choices[0].logprobs.content[0].top_logprobs)==lp
        assert len(r.choices)==k and r.choices[0].message.role=="assistant" and isinstance(r.choices[0].message.content,str); return
    first={};fin={};cnt={}
    for r in c.chat.completions.create(**kw,stream=True,stream_options={"include_usage":True}):
        if r.usage is not None: continue
        ch=r.choices[0]; i=ch.index
        if ch.finish_reason is not None: fin[i]=True; cnt[i]=cnt.get(i,0)+1
        d=ch.delta
        if first.get(i,True):
            assert d.role=="assistant"; first[i]=False; continue
        if lp and not fin.get(i,False):
            assert ch.logprobs and len(ch.logprobs.content[0].top_logprobs)==lp
        assert isinstance(d.content,str) or isinstance(d.reasoning_content,str) or (isinstance(d.tool_calls,list) and d.tool_calls) or ch.finish_reason
    assert all(cnt[i]==1 for i in range(k))
for stream in (False,True):
    for lp in (None,5):
        for k in (1,2): run(f"chat {stream,lp,k}",lambda: chat(lp,k,stream))
def rx():
    t=c.chat.completions.create(model=M,messages=[{"role":"user","content":"Introduce the capital of France."}],temperature=0,max_tokens=128,extra_body={"regex":'\\{\n   "name": "[\\w]+",\n   "population": [\\d]+\n\\}'}).choices[0].message.content
    o=json.loads(t); assert isinstance(o["name"],str) and isinstance(o["population"],int)
run("regex",rx)
def models():
    m=list(c.models.list()); assert len(m)==1 and isinstance(m[0].max_model_len,int)
    r=c.models.retrieve(M); assert r.id==M and r.root==M
    try: c.models.retrieve("non-existent-model"); assert False
    except openai.NotFoundError: pass
run("models",models)
def resp():
    r=requests.post(U+"/v1/responses",json={"model":M,"input":"Introduce the capital of France.","temperature":0,"max_output_tokens":32,"frequency_penalty":1.0}); assert r.status_code==200; b=r.json(); assert b["object"]=="response" and "output" in b and "status" in b
    r=requests.post(U+"/v1/responses",json={"model":M,"input":"Hi","previous_response_id":"bad"}); assert r.status_code==400 and all(k in r.json()["error"] for k in ("message","type","code"))
    with c.responses.stream(model=M,input=P,temperature=0,max_output_tokens=16) as s: ev=[e.type for e in s]; assert "response.created" in ev and "response.in_progress" in ev
run("responses",resp)
def ms():
    for path,b in (("/v1/completions",{"prompt":P}),("/v1/chat/completions",{"messages":[{"role":"user","content":P}]})):
        free=requests.post(U+path,json={**b,"model":M,"temperature":0,"max_tokens":20}).json()["choices"][0]; t=free.get("text") or free["message"]["content"]; assert free["matched_stop"] is None and free["finish_reason"]=="length"
        s=t[4]; r=requests.post(U+path,json={**b,"model":M,"temperature":0,"top_p":1,"max_tokens":100,"stop":s}).json()["choices"][0]; assert r["finish_reason"]=="stop" and r["matched_stop"]==s
run("matched_stop",ms)
def ie():
    r=c.chat.completions.create(model=M,messages=[{"role":"user","content":"Count"}],temperature=0,max_tokens=50,extra_body={"ignore_eos":True}); assert r.choices[0].finish_reason=="length"
run("ignore_eos",ie)
def eb():
    r=c.chat.completions.create(model=M,messages=[{"role":"user","content":"x"}],temperature=0,max_tokens=64,extra_body={"ebnf":'root ::= "Hello" | "Hi" | "Hey"'}); assert r.choices[0].message.content in ("Hello","Hi","Hey")
run("ebnf",eb)
def js():
    sch=json.dumps({"type":"object","properties":{"name":{"type":"string","pattern":"^[\\w]+$"},"population":{"type":"integer"}},"required":["name","population"],"additionalProperties":False})
    r=c.chat.completions.create(model=M,messages=[{"role":"user","content":"x"}],temperature=0,max_tokens=256,extra_body={},response_format={"type":"json_schema","json_schema":{"name":"foo","schema":json.loads(sch)}}); t=r.choices[0]
    if t.finish_reason=="stop": assert isinstance(json.loads(t.message.content)["population"],int)
run("json_constrained",js)
def mal():
    for b in ({"model":M,"messages":[]},{"model":M,"messages":[{"role":"user","content":"a"}],"temperature":-1},{"model":M,"messages":[{"role":"user","content":"a"}],"max_tokens":0}):
        assert requests.post(U+"/v1/chat/completions",json=b).status_code==400
    assert requests.post(U+"/v1/chat/completions",data="{",headers={"content-type":"application/json"}).status_code==400
run("body_validation",mal)
print(n-bad,"passed of",n)
