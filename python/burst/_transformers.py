"""burst.register: attention of transformers' models over a group."""


def register(group=None, layout="zigzag", name="burst", **arguments):
    """Adds `name` to transformers' attention implementations, for

        model = AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="burst")

    Every rank of the group has its part of each sequence and says which in position_ids:

        own = burst.positions(seqlen, group, device=...)
        model(input_ids=input_ids[:, own], position_ids=own[None], use_cache=False)

    `arguments`: those of burst.attention (documents, strategy, ...). Models without padding and
    without a cache; a sliding window, sinks, dropout and capped logits of the model are honored.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ._attention import attention

    def forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                sliding_window=None, is_causal=None, softcap=None, s_aux=None, position_bias=None, **_):
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask: sequences with padding; pack documents instead "
                             "(documents=...)")
        if position_bias is not None:
            raise ValueError("position_bias: nothing is added to logits here")
        if query.shape[2] != key.shape[2]:
            raise ValueError("key has %d tokens, query %d: a cache of keys; set use_cache=False" %
                             (key.shape[2], query.shape[2]))
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        given = dict(causal=is_causal, softmax_scale=scaling, window=sliding_window or 0,
                     sinks=s_aux, group=group, layout=layout, softcap=softcap, dropout_p=dropout)
        given.update(arguments)
        out = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **given)
        return out, None

    ALL_ATTENTION_FUNCTIONS.register(name, forward)
