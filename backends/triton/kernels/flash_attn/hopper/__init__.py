"""Hopper's own attention kernels (sm_90), written in Gluon with explicit warp specialization.

half.py, quant.py and mla.py have a kernel each, for K and V of 16 bits, of quantized blocks and of MLA's shape. What
they are made of: work.py (which tiles and k-blocks a program visits), rings.py (buffers in shared memory), queries.py,
masks.py, softmax.py, softcap.py. consumer.py is the consumer warpgroups' code of half.py and quant.py; mla_scorer.py,
mla_accumulator.py and mla_parts.py are mla.py's. On the host, specs.py and configs.py have their compile-time choices,
launch.py their arguments, kernels.py which problems they serve.
"""
