"""Stand-ins for attention libraries that need a GPU: the signatures of their sources, their conditions on what they are
given, and attention by its definition."""

import types

import torch

LOW = (torch.float16, torch.bfloat16)


def attention(q, keys, values, table, lengths, starts, causal, left):
    """Of ``q`` [T, H, D] over pages [pages, block, G, D], token by token in fp64; ``left``: tokens before its own that
    a token sees, below 0: all."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    block, repeat = keys.shape[1], q.shape[1] // keys.shape[2]
    for b, length in enumerate(lengths.tolist()):
        new = int(starts[b + 1] - starts[b])
        at = torch.arange(length)
        page, place = table[b].long()[at // block], at % block
        k, v = (t[page, place].double().repeat_interleave(repeat, 1) for t in (keys, values))  # [length, H, D]
        for i in range(new):
            position = length - new + i
            seen = at <= position if causal else at >= 0
            seen &= at >= position - left if left >= 0 else True
            row = int(starts[b]) + i
            scores = torch.einsum("hd,lhd->hl", q[row].double(), k) * q.shape[2] ** -0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(1)
            out[row] = torch.einsum("hl,lhd->hd", weights, v)
    return out.to(q.dtype)


def checked(q, keys, values, table, starts, lengths, low=True):
    """What all of them require."""
    assert q.dim() == 3
    assert keys.shape == values.shape
    assert keys.dim() == 4
    assert keys.stride(-1) == values.stride(-1) == q.stride(-1) == 1
    assert q.dtype == keys.dtype == values.dtype
    assert not low or q.dtype in LOW
    assert table.dtype == starts.dtype == lengths.dtype == torch.int32
    assert table.shape[0] == len(starts) - 1 == len(lengths)
    assert table.stride(-1) == 1
    assert starts.is_contiguous()
    assert lengths.is_contiguous()
    assert q.shape[1] % keys.shape[2] == 0
    assert q.shape[2] == keys.shape[3]
    assert int(starts[-1]) == len(q)


def flash_2():
    """The package flash_attn, version 2."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        lengths = cu_seqlens_k.diff()
        checked(q, k, v, block_table, cu_seqlens_q, lengths)
        assert cu_seqlens_k.dtype == torch.int32
        assert k.shape[1] % 256 == 0
        assert q.shape[2] % 8 == 0
        assert q.shape[2] <= 256
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())  # for which programs are started
        assert max_seqlen_k >= int(lengths.max())
        assert dropout_p == softcap == 0
        if window_size[1] >= 0 and causal:
            assert window_size[1] == 0
        return attention(q, k, v, block_table, lengths, cu_seqlens_q, causal, window_size[0])

    return types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


def flash_3(low=True):
    """The module flash_attn_interface of FlashAttention 3."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        checked(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, low)
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())  # for which programs are started
        return attention(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, causal, window_size[0])

    return types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


def flashinfer(low=True):
    """The package flashinfer; ``plans`` counts."""

    class Wrapper:
        plans = 0

        def __init__(
            self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
            paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
            mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
        ):  # fmt: skip
            assert float_workspace_buffer.dtype == torch.uint8
            assert float_workspace_buffer.numel() >= 128 * 2**20
            assert kv_layout == "NHD"

        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
            pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
            rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
            non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
            max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
            max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None,
        ):  # fmt: skip
            Wrapper.plans += 1
            given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            assert all(t.dtype == torch.int32 for t in given)
            # Those that are read on the host are there, so that it waits for no copy.
            assert qo_indptr.device == paged_kv_indptr.device == paged_kv_last_page_len.device == torch.device("cpu")
            used = paged_kv_indptr.diff()
            assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
            assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
            assert bool((paged_kv_last_page_len >= 1).all())
            assert bool((paged_kv_last_page_len <= page_size).all())
            assert bool((qo_indptr.diff() > 0).all())
            self.lengths = ((used - 1) * page_size + paged_kv_last_page_len).int()
            self.table = torch.zeros(len(used), int(used.max()), dtype=torch.int32)
            for b, part in enumerate(paged_kv_indices.split(used.tolist())):
                self.table[b, : len(part)] = part
            self.starts, self.causal, self.left = qo_indptr, causal, window_left
            self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type)

        def run(self, q, paged_kv_cache, *args, **options):
            keys, values = paged_kv_cache
            checked(q, keys, values, self.table, self.starts, self.lengths, low)
            assert self.shape == (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1], q.dtype, keys.dtype)
            assert keys.stride() == values.stride()
            return attention(q, keys, values, self.table, self.lengths, self.starts, self.causal, self.left)

    return types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)


def pytorch(library):
    """PyTorch's own operator behind its own front and schema, on the CPU: registered with ``library``."""

    def _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
        num_splits=None,
    ):  # fmt: skip
        checked(query, key, value, block_table, cum_seq_q, seqused_k)
        assert key.shape[1] % 256 == 0
        assert max_q == int(cum_seq_q.diff().max())
        assert max_k >= int(seqused_k.max())
        causal = is_causal or window_size_right == 0
        out = attention(query, key, value, block_table, seqused_k, cum_seq_q, causal, window_size_left)
        empty = torch.empty(0)
        return out, torch.empty(query.shape[1], len(query)), empty, empty, empty

    library.impl("_flash_attention_forward", _flash_attention_forward, "CPU")
