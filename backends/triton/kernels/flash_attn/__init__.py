"""FLASH_ATTN_EXT on a GPU: the schedule, the choice of a schedule, the kernels."""
