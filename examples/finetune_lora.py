"""Fine-tune a language model on questions and answers with LoRA, and save the adapter.

    python examples/finetune_lora.py                      # trains a small base model first
    python examples/finetune_lora.py --model tiny         # or a run of hypermlp train

With TRL installed (pip install trl) its SFTTrainer trains, without padding; otherwise transformers' Trainer
does the same. Both pack the examples into one row, and every example sees itself alone. Needs
pip install 'hypermlp[train]' peft. Takes about two minutes on a CPU.
"""

import argparse
import random
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

from hypermlp.models import HyperMLPForCausalLM
from hypermlp.models.loading import model_folder
from hypermlp.train.recipe import load_recipe
from hypermlp.train.run import train

try:
    from peft import LoraConfig, get_peft_model
except ImportError as error:
    raise SystemExit(f"this example needs peft: pip install peft ({error})") from error
try:
    from trl import SFTConfig, SFTTrainer
except ImportError:
    SFTTrainer = None

BATCH, RATE = 32, 1e-2
LORA = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", target_modules="all-linear")


def questions(count: int, seed: int) -> list[dict[str, str]]:
    """Return questions about one line of Python, with their answers."""
    draw = random.Random(seed)
    names = ["x", "y", "total", "count", "name", "value", "result", "items"]
    rows = []
    for _ in range(count):
        name, number = draw.choice(names), draw.randrange(100)
        rows.append({"prompt": f"Q: set {name} to {number}\nA:", "completion": f" {name} = {number}\n"})
    return rows


def encode(row: dict[str, str], tokenizer) -> dict[str, list[int]]:
    """Return the tokens of an example; only those of the answer are targets."""
    prompt, answer = (tokenizer(row[key])["input_ids"] for key in ("prompt", "completion"))
    answer = [*answer, tokenizer.eos_token_id]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


@torch.no_grad()
def loss_of(model, tokenizer, rows: list[dict[str, str]]) -> float:
    """Return the mean loss of the answers."""
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [encode(row, tokenizer) for row in rows]
    )
    return float(model(**batch).loss)


def fine_tune(model, tokenizer, rows: list[dict[str, str]], steps: int, folder: Path):
    """Train an adapter for the model and return the model with it."""
    settings = {
        "output_dir": str(folder / "trainer"),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "logging_steps": max(1, steps // 10),
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
    }
    if SFTTrainer is not None:
        options = {"padding_free": True, "max_length": None, "bf16": False, "gradient_checkpointing": False}
        trainer = SFTTrainer(
            model,
            args=SFTConfig(**settings, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LORA,
        )
    else:
        trainer = Trainer(
            get_peft_model(model, LORA),
            args=TrainingArguments(**settings),
            train_dataset=Dataset.from_list([encode(row, tokenizer) for row in rows]),
            data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        )
    trainer.train()
    return trainer.model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="tiny, a run, or a folder (default: a small one is trained first)")
    parser.add_argument("--steps", type=int, default=100, help="steps of fine-tuning (default: 100)")
    parser.add_argument("--base-steps", type=int, default=100, help="steps of the base model (default: 100)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/finetuned"),
        help="folder of the adapter (default: runs/finetuned)",
    )
    args = parser.parse_args()
    if args.model is None:
        recipe = load_recipe("demo", [f"training.steps={args.base_steps}", "training.warmup_steps=0"])
        args.model = str(train(recipe, args.out / "base"))
    folder = model_folder(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = HyperMLPForCausalLM.from_pretrained(folder).eval()
    held_out = questions(64, seed=1)
    before = loss_of(model, tokenizer, held_out)
    tuned = fine_tune(model, tokenizer, questions(2000, seed=0), args.steps, args.out)
    after = loss_of(tuned, tokenizer, held_out)
    tuned.save_pretrained(args.out)
    trained = sum(parameter.numel() for parameter in tuned.parameters() if parameter.requires_grad)
    print(f"loss of held-out answers: {before:.3f} before, {after:.3f} after; {trained:,} parameters trained")
    prompt = tokenizer(held_out[0]["prompt"], return_tensors="pt")
    ids = tuned.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
