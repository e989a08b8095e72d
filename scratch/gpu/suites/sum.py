import re,sys
for f in sys.argv[1:]:
    t=open(f).read(); print("##",f.split("/")[-1],t.strip().splitlines()[-1])
    for m in re.finditer(r"^_{3,} (.*?) _{3,}\n(.*?)(?=^_{3,} |^=====)",t,re.M|re.S):
        lines=m[2].splitlines()
        src=[l for l in lines if re.match(r"^(tests|unit|utils)\S*:\d+: in",l)]
        i=max([k for k,l in enumerate(lines) if re.match(r"^(tests|unit)\S*:\d+: in",l)] or [0])
        es=[l[4:] for l in lines if l.startswith("E   ")][:3]
        print("-",m[1][:70],"|",src[-1].split(":")[1] if src else "", lines[i+1].strip()[:100] if i+1<len(lines) else "","|"," / ".join(es)[:220])
