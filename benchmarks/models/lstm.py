"""The large LSTM of Zaremba and others (2014) on the Penn Treebank: two layers of 1500 units, 66 million parameters.

A language model over 10,000 words, unrolled over 35 of them in the paper, with dropout 0.65 between the layers. It uses
torch.nn's LSTM, which has two biases where the paper has one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models.workload import CrossEntropy, Workload

VOCABULARY = 10_000
UNITS = 1500
LAYERS = 2
TOKENS = 35
DROPOUT = 0.65


class LstmLanguageModel(nn.Module):
    """Maps tokens to logits over the vocabulary."""

    def __init__(self, vocabulary: int, units: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, units)
        self.dropout = nn.Dropout(DROPOUT)
        self.lstm = nn.LSTM(units, units, LAYERS, batch_first=True, dropout=DROPOUT)
        self.head = nn.Linear(units, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.words(tokens)))
        out: Tensor = self.head(self.dropout(states))
        return out


def lstm(batch: int, tokens: int = TOKENS, vocabulary: int = VOCABULARY, units: int = UNITS) -> Workload:
    inputs = torch.randint(vocabulary, (batch, tokens))
    loss = CrossEntropy(vocabulary, batch, tokens, last=True)
    return Workload(LstmLanguageModel(vocabulary, units), (inputs,), loss)
