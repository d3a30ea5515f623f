"""BERT-base in pre-training: the language head reads only the masked tokens, which are every seventh here.

About 15 % of the tokens are masked (Devlin and others 2018), and the published code gathers them before its head. The
logits over the vocabulary are therefore a seventh of those of all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.bert import BASE_LAYERS, BASE_WIDTH, TOKENS, VOCABULARY, Bert
from benchmarks.models.workload import CrossEntropy, Workload

EVERY = 7


class MaskedBert(nn.Module):
    """Maps tokens to logits for every seventh token."""

    def __init__(self, bert: Bert, count: int) -> None:
        super().__init__()
        self.bert = bert
        self.register_buffer("masked", torch.arange(0, count, EVERY))

    def forward(self, tokens: Tensor) -> Tensor:
        bert = self.bert
        x = bert.words(tokens) + bert.places.weight[: tokens.shape[1]] + bert.segments.weight[0]
        x = bert.layers(bert.dropout(bert.norm(x))).flatten(0, 1)
        return functional.linear(bert.head(x.index_select(0, self.get_buffer("masked"))), bert.words.weight, bert.bias)


def masked_bert_base(batch: int, tokens: int = TOKENS) -> Workload:
    inputs = torch.randint(VOCABULARY, (batch, tokens))
    model = MaskedBert(Bert(BASE_LAYERS, BASE_WIDTH), batch * tokens)
    return Workload(model, (inputs,), CrossEntropy(VOCABULARY, len(model.get_buffer("masked"))))
