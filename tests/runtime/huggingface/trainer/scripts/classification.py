"""Classify lines of text: accuracy after each epoch, and an end when it no longer rises."""

import sys

import numpy as np
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EarlyStoppingCallback, TrainingArguments

# isort: split
from transformers import Trainer

folder, text, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder)
with open(text, encoding="utf-8") as file:
    lines = [line for line in file if len(line) > 8]
rows = [{**tokenizer(line, truncation=True, max_length=40), "label": int("def" in line)} for line in lines]


def accuracy(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


args = TrainingArguments(
    output, num_train_epochs=4, per_device_train_batch_size=8, per_device_eval_batch_size=5, learning_rate=1e-3,
    optim="adafactor", label_names=["labels"], eval_strategy="epoch", save_strategy="epoch",
    metric_for_best_model="accuracy", load_best_model_at_end=True, logging_steps=1, report_to=[], use_cpu=True,
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[:24],
    eval_dataset=rows[24:37],
    processing_class=tokenizer,
    compute_metrics=accuracy,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model(output)
