"""Teach an encoder-decoder to give the second half of a line; its evaluation generates."""

import sys

import numpy as np
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainingArguments

# isort: split
from transformers import Seq2SeqTrainer

folder, text, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
with open(text, encoding="utf-8") as file:
    lines = [line for line in file if len(line) > 8]
rows = [tokenizer(line, text_target=line[len(line) // 2 :], truncation=True, max_length=40) for line in lines]


def length(prediction):
    return {"length": float((np.asarray(prediction.predictions) > 0).sum(-1).mean())}


args = Seq2SeqTrainingArguments(
    output, max_steps=3, per_device_train_batch_size=6, learning_rate=3e-3, adam_epsilon=1e-6,
    label_smoothing_factor=0.1, predict_with_generate=True, generation_max_length=8, eval_strategy="steps",
    eval_steps=3, save_steps=3, logging_steps=1, report_to=[], use_cpu=True,
)  # fmt: skip
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=rows[:20],
    eval_dataset=rows[20:25],
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    compute_metrics=length,
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model(output)
