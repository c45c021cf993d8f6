"""Sentence embeddings with sentence-transformers: pairs of texts, the other pairs of a batch as negatives."""

from __future__ import annotations

import sys
import tempfile

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    models,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from tiny_language_model import make_tokenizer, texts
from transformers import AutoConfig, AutoModel

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder)
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        AutoModel.from_config(AutoConfig.for_model("bert", vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
        words = models.Transformer(folder)
        model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu")
    data = Dataset.from_dict({"anchor": texts(200), "positive": texts(200)[::-1]})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=16, num_train_epochs=1
    )
    trainer = SentenceTransformerTrainer(model, arguments, data, loss=MultipleNegativesRankingLoss(model))
    trainer.train()
    model.save_pretrained(sys.argv[1])
