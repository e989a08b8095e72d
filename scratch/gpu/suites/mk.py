import sys
sys.path[:0]=["/work/wt/suites","/work/wt/suites/tests"]
from pathlib import Path
from support.tiny import write_model, CHAT
import importlib.util as u; s=u.spec_from_file_location("cc","/work/wt/suites/tests/tools/serve/conftest.py"); c=u.module_from_spec(s); s.loader.exec_module(c)
d=Path("/tmp/su/models")
write_model(d/"tiny.gguf","llama",tokenizer="spm",chat=c.TOOLS,context_length=4096,vocab=c.FIM)
try:
    write_model(d/"bert.gguf","bert")
except Exception as e: print("bert",e)
