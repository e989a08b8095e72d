import re, subprocess, glob, os
keep = []
for f in glob.glob("*.ptx"):
    text = open(f, errors="replace").read()
    names = re.findall(r"\.entry (\w+)", text)
    if not names: continue
    d = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    joined = "\n".join(d)
    why = None
    if any("flash_attn_tile" in x for x in d): why = "tile"
    if re.search(r"flash_attn_tile", " ".join(names)): why = "tile"
    m = [int(x) for x in re.findall(r"mul_mat_q<\(ggml_type\)(\d+)", joined)]
    if m and not set(m) & {8, 12, 14, 39}: why = "mmq"
    if "mul_mat_f_ids" in joined or "mul_mat_f<" in joined: why = "mmf"
    fa = re.findall(r"flash_attn_ext_f16<(\d+), (\d+), (\d+), (\d+)", joined) + re.findall(r"flash_attn_ext_f16ILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)", " ".join(names))
    if fa and not any(int(a[0]) in (64, 128) and int(a[3]) in (4, 8) for a in fa): why = "fa"
    vec = re.findall(r"flash_attn_ext_vecILi(\d+)ELi\d+EL9ggml_type(\d+)", " ".join(names))
    if vec and not any(t == "1" for _, t in vec): why = "vec"
    if not why: keep.append((os.path.getsize(f), f))
keep.sort(reverse=True)
print(len(keep), sum(s for s, _ in keep) / 1e6)
open("keep.txt", "w").write("\n".join(f for _, f in keep) + "\n")
