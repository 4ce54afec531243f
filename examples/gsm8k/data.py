"""GSM8K as prompts of chat messages.

{"question", "answer": "... #### 42"}   ->   {"prompt": [system, user], "answer": "42"}

python -m examples.gsm8k.data --source train.jsonl --output data/train.jsonl    from a file as published
python -m examples.gsm8k.data --split train --output data/train.jsonl           from the hub, needs `datasets`
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SYSTEM = "Reason step by step, then give the final number on a last line of the form '#### number'."


def record(question: str, answer: str) -> dict:
    """One training record. `answer` is the number after `####`, without thousands separators."""
    number = answer.rpartition("####")[2].strip().replace(",", "")
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
    ]
    return {"prompt": messages, "answer": number}


def from_file(path: Path) -> Iterator[Mapping[str, str]]:
    """Rows of a JSONL file with `question` and `answer`."""
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def from_hub(split: str) -> Iterable[Mapping[str, str]]:
    """Rows of openai/gsm8k through the `datasets` library."""
    from datasets import load_dataset

    return load_dataset("openai/gsm8k", "main", split=split)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        type=Path,
        help="a JSONL file with question and answer instead of the hub's",
    )
    parser.add_argument("--split", default="train", choices=("train", "test"))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = from_file(options.source) if options.source else from_hub(options.split)
    records = [record(row["question"], row["answer"]) for row in rows]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8"
    )
    print(f"{options.output}: {len(records)} records")


if __name__ == "__main__":
    main()
