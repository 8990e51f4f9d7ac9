"""Fine-tune adapters of a causal language model, and nothing else of it."""

import sys

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

# isort: split
from transformers import Trainer

folder, text, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
with open(text, encoding="utf-8") as file:
    rows = [tokenizer(line, truncation=True, max_length=40) for line in file if len(line) > 8]

args = TrainingArguments(
    output,
    max_steps=4,
    per_device_train_batch_size=6,
    learning_rate=0.03,
    optim="sgd",
    save_steps=2,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[:24],
    eval_dataset=rows[24:30],
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model(output)
