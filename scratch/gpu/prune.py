"""Zeroes the code of all GPUs but sm_90 in a shared library's .nv_fatbin, so that it packs small."""
import struct, sys, subprocess, collections
src, dst = sys.argv[1:]
data = bytearray(open(src, "rb").read())
out = subprocess.run(["readelf", "-SW", src], capture_output=True, text=True).stdout
for line in out.splitlines():
    if ".nv_fatbin" in line or "nv_fatbin" in line:
        p = line.replace("[", " ").replace("]", " ").split()
        print(p)
        name, off, size = p[1], int(p[4], 16), int(p[5], 16)
        i, end = off, off + size
        seen = collections.Counter()
        while i < end - 16:
            magic, ver, hs, fat = struct.unpack_from("<IHHQ", data, i)
            if magic != 0xBA55ED50:
                i += 8; continue
            j, stop = i + hs, i + hs + fat
            while j < stop:
                kind, _, ehs, esize = struct.unpack_from("<HHIQ", data, j)
                arch = struct.unpack_from("<I", data, j + 28)[0]
                seen[kind, arch] += esize
                if arch != 90 or kind != 1:
                    data[j + ehs : j + ehs + esize] = bytes(esize)
                j += ehs + esize
            i = stop
        print(seen)
open(dst, "wb").write(data)
