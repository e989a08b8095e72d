"""Puts sm_90 code in the place of a library's containers of PTX, zeroes the rest."""
import os, struct, subprocess
src, dst = "package/bins/linux-x64-cuda/libggml-cuda.so", "libggml-cuda.so"
data = bytearray(open(src, "rb").read())
for line in subprocess.run(["readelf", "-SW", src], capture_output=True, text=True).stdout.splitlines():
    if " .nv_fatbin" in line:
        p = line.replace("[", " ").replace("]", " ").split()
        off, size = int(p[4], 16), int(p[5], 16)
i, end, n, put, big = off, off + size, 0, 0, 0
while i < end - 16:
    magic, ver, hs, fat = struct.unpack_from("<IHHQ", data, i)
    if magic != 0xBA55ED50:
        i += 8; continue
    n += 1
    total = hs + fat
    cubin = f"cubin/libggml-cuda.{3*n}.sm_90.ptx.cubin"
    if os.path.exists(cubin):
        subprocess.run(["nv/nvidia/cu13/bin/fatbinary", "--create=/tmp/one.fatbin", "-64", "--compress-all", f"--image3=kind=elf,sm=90,file={cubin}"], check=True)
        new = open("/tmp/one.fatbin", "rb").read()
        m2, v2, h2, f2 = struct.unpack_from("<IHHQ", new, 0)
        assert m2 == magic and h2 + f2 <= total, (n, h2 + f2, total)
        data[i : i + total] = bytes(total)
        data[i : i + h2 + f2] = new[: h2 + f2]
        put += 1; big += h2 + f2
    else:
        data[i + hs : i + total] = bytes(fat)
        struct.pack_into("<IHHQ", data, i, magic, ver, hs, 0)
    i += total
print(n, "containers,", put, "with sm_90 code,", big / 1e6, "MB")
open(dst, "wb").write(data)
