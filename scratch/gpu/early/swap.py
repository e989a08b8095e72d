"""An upper bound, with wrong results: decode.py's first copies begin before gdc_wait. swap.py TREE"""
import sys
path = f"{sys.argv[1]}/backends/triton/kernels/flash_attn/decode.py"
text = open(path).read()
wait = "        if PDL and WAIT_LATE:  # so late that all that comes before overlaps with the kernel before\n            gdc_wait()\n"
assert text.count(wait) == 1
end = "        if COLUMNS:\n            m, l, acc = column_sums("
assert text.count(end) == 1
open(path, "w").write(text.replace(wait, "").replace(end, wait + end))
