"""Fine-tune a causal language model on lines of text: schedule, evaluation, the best checkpoint at the end."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

# isort: split
from transformers import Trainer

folder, text, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
with open(text, encoding="utf-8") as file:
    rows = [tokenizer(line, truncation=True, max_length=40) for line in file if len(line) > 8]

args = TrainingArguments(
    output, num_train_epochs=1, per_device_train_batch_size=4, per_device_eval_batch_size=3,
    gradient_accumulation_steps=2, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.01,
    max_grad_norm=0.5, dataloader_drop_last=True, eval_strategy="steps", eval_steps=2, save_steps=2,
    save_total_limit=1, load_best_model_at_end=True, logging_steps=1, report_to=[], use_cpu=True,
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[:40],
    eval_dataset=rows[40:46],
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model(output)
