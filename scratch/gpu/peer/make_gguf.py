"""A GGUF file of a synthetic model: make_gguf.py NAME FILE."""
import sys, time
import numpy as np, gguf
from graphrt.models.synthetic import synthetic

name, path = sys.argv[1:]
t = time.time()
f = synthetic(name, vocabulary=True)
w = gguf.GGUFWriter(path, f.recipe.arch)
values = {k: f.metadata[k] for k in f.metadata}
for k, v in values.items():
    if k == "general.architecture":
        continue
    if isinstance(v, bool): w.add_bool(k, v)
    elif isinstance(v, (int, np.integer)): w.add_uint32(k, int(v))
    elif isinstance(v, (float, np.floating)): w.add_float32(k, float(v))
    elif isinstance(v, str): w.add_string(k, v)
    else: w.add_array(k, v.tolist() if isinstance(v, np.ndarray) else list(v))
w.add_string("tokenizer.ggml.pre", "default")
QT = {t.name.lower(): t for t in gguf.GGMLQuantizationType}
for n, info in f.tensors.items():
    q = QT[info.dtype.name.lower()]
    shape = list(reversed(info.ne))
    data = f.data(n)
    rows = int(np.prod(shape[:-1])) if len(shape) > 1 else 1
    kind = info.dtype.name
    if kind == "f32": arr = np.frombuffer(data, np.float32).reshape(shape); w.add_tensor(n, arr)
    elif kind == "f16": arr = np.frombuffer(data, np.float16).reshape(shape); w.add_tensor(n, arr)
    else:
        arr = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)
        w.add_tensor(n, arr, raw_dtype=q)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
print(name, path, f"{time.time() - t:.1f} s", f"{f.nbytes/1e9:.2f} GB")
