"""FLASH_ATTN_BACK, form "split": of q, of k and of v by a kernel each, without atomics, the same bits each time."""
