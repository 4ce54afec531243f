"""A serialized tokenizer decodes as transformers' own, and reward workers import neither it nor torch."""

import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from transformers import AutoTokenizer

from tests.workers.tokenizer_schemes import SCHEMES, make_tokenizer
from workers.roles.text_decoder import Decoder, serialize
from workers.user_code.rewards import RewardFunction

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_serialized_tokenizer_decodes_as_its_original(
    scheme: str, tmp_path: Path
) -> None:
    make_tokenizer(scheme, thinks=True).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    decoder = Decoder(serialize(tokenizer))
    ids = [*range(len(tokenizer)), *tokenizer("two  [two]\n<think> two </s>").input_ids]
    for start in range(0, len(ids), 7):
        part = ids[start : start + 20]
        for skips in (False, True):
            expected = tokenizer.decode(part, skip_special_tokens=skips)
            assert decoder.decode(part, skip_special_tokens=skips) == expected
    assert decoder.decode(ids) == tokenizer.decode(ids)


def test_decoding_that_is_more_than_the_backends_is_not_serialized(tmp_path: Path) -> None:
    make_tokenizer("prepend").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert serialize(tokenizer)
    tokenizer.clean_up_tokenization_spaces = True
    assert not serialize(tokenizer)

    class OwnDecoding(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, *ids: int, **options: object) -> str:
            return ""

    own = OwnDecoding(tokenizer_object=tokenizer.backend_tokenizer)
    assert not serialize(own)
    assert not serialize(object())


SCORING = """
import pathlib, pickle, sys
import numpy as np
from workers.batch.dataproto import DataProto
from workers.roles.reward import RewardWorker, ScoreRequest

functions, backend, ids = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
versions = np.array([-1, -1, *[0] * (len(ids) - 2)], np.int32)
row = {"input_ids": np.array(ids, np.int32), "weight_versions": versions}
worker = RewardWorker(functions, "", timeout_s=60, concurrency=1, backend=backend)
(score,) = worker.score(DataProto.from_rows([row]), [ScoreRequest(0, 2, {})])
print(score.response, score.reward, [m for m in ("torch", "transformers") if m in sys.modules])
"""


def test_a_reward_worker_scores_without_torch(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bytes")
    ids = tokenizer("two [two] two two").input_ids
    reward = cloudpickle.dumps(lambda response: len(response))
    function = RewardFunction("length", 1.0, reward, ())
    values = [function], serialize(tokenizer), ids
    (tmp_path / "values").write_bytes(cloudpickle.dumps(values))
    process = subprocess.run(
        [sys.executable, "-c", SCORING, str(tmp_path / "values")],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
    )
    response = tokenizer.decode(ids[2:], skip_special_tokens=True)
    assert process.stdout.strip() == f"{response} {float(len(response))} []", process.stderr
