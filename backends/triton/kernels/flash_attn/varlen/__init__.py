"""Attention of packed queries of sequences of any length, over pages or packed keys (FLASH_ATTN_VARLEN).

Tiles are (sequence, query tile, group of heads), listed on the device each run; all else, units of work, softmax,
parts of tiles and their fixup, is as for other attentions.
"""
