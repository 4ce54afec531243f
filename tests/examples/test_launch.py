"""The worked placements fit the clusters that their own comments name, and no smaller ones; the launchers'
files are valid, and what they start passes a dry run.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from controller.fit import main
from tests.documentation.blocks import ROOT, commands
from tests.documentation.checks import CHECKS, dry_run, ray_understands

LAUNCH = ROOT / "examples" / "launch"
PLACEMENTS = ["one_gpu", "eight_gpus", "sixty_four_gpus", "../gsm8k/one_gpu"]
LAYOUTS = ["qwen3_30b_a3b_8_gpus", "qwen3_30b_a3b_64_gpus", "qwen3_235b_a22b_256_gpus"]
PLACEMENTS += [f"experts/{name}" for name in LAYOUTS]


def command_of(name: str) -> list[str]:
    """The arguments of the dry run that a placement's comment shows."""
    (line,) = re.findall(
        r"python -m controller.fit (.+)", (LAUNCH / f"{name}.yaml").read_text()
    )
    return line.split()


@pytest.mark.parametrize(
    "name",
    [
        name if name == "eight_gpus" else pytest.param(name, marks=pytest.mark.slow)
        for name in PLACEMENTS
    ],
)
def test_a_placement_fits_the_memory_that_it_is_for_and_no_quarter_of_it(
    documentation_workspace: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """About 16 CPU seconds: only here is a worked file measured and compared with the memory that it names."""
    *arguments, cluster = command_of(name)
    assert main([*arguments, cluster]) == 0, capsys.readouterr().err
    page = capsys.readouterr().out
    assert "\npolicy update: policy " in page or "\npolicy update: the pass " in page
    assert "idle" not in page
    smaller = re.sub(
        r"gpu_gib=(\d+)", lambda found: f"gpu_gib={int(found[1]) // 4}", cluster
    )
    assert main([*arguments, smaller]) == 2
    assert re.search("training needs about|gives an engine", capsys.readouterr().err)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_needs_all_its_gpus_and_no_network(
    documentation_workspace: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With an empty hub cache; a run still says what is missing."""
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(documentation_workspace / "empty")
    )
    *arguments, cluster = [*command_of(name)[:-2], "--no-measure", *command_of(name)[-2:]]
    assert main([*arguments, cluster]) == 0
    told = capsys.readouterr()
    assert "== cluster ==" in told.out
    assert ("asking the hub" in told.out, told.err) == (False, "")
    fewer = re.sub(
        r",gpus=(\d+)", lambda found: f",gpus={int(found.group(1)) - 1}", cluster
    )
    assert main([*arguments, fewer.replace(",gpus=0", "")]) == 2
    assert re.search("does not fit|without GPUs", capsys.readouterr().err)
    assert main([*command_of(name)[:2], "--dry-run", "resources.device=cuda"]) == 2
    assert (
        "no such model in the local hub cache. A model of the hub is fetched by `hf download"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_the_page_on_parallelism_has_the_figures_of_its_layouts(
    documentation_workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "parallelism.md").read_text()
    rows = {
        row[0]: row[1:]
        for row in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", page, re.M)
    }
    for column, name in enumerate(LAYOUTS):
        assert main(command_of(f"experts/{name}")) == 0
        found = capsys.readouterr().out
        ((parts, in_all),) = re.findall(r"policy update: (.+) = (.+)", found)
        assert rows["an update: states + the pass"][column] == " + ".join(
            re.findall(r"[a-z] ([\d.]+)", parts)
        )
        assert rows["in all"][column] == in_all
        (weights,) = re.findall(r"an engine: ([\d.]+) of weights", found)
        assert rows["an engine's weights"][column] == weights


def commands_in_comments(name: str) -> list[list[str]]:
    """The commands that a file's first comment shows."""
    lines = re.findall(r"^#     (.+)$", (LAUNCH / name).read_text(), re.M)
    return commands("\n".join(lines))


def test_the_ray_job_is_one_that_kuberay_takes(documentation_workspace: Path) -> None:
    """The keys that the operator's reference demands, GPUs on the workers, and a command that passes a dry
    run.
    """
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for group, gpus in ((head, None), (workers, "8")):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} <= {
            volume["name"] for volume in pod["volumes"]
        }
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    python, dash_m, module, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (python, dash_m, module) == ("python", "-m", "controller.fit")
    dry_run(main, arguments)


def test_the_cluster_launchers_file_is_of_rays_schema(
    documentation_workspace: Path,
) -> None:
    cluster = yaml.safe_load((LAUNCH / "ray_cluster.yaml").read_text())
    # What `ray up` does with a file before it does anything else.
    validate_config(prepare_config(cluster))
    assert (
        cluster["min_workers"]
        == cluster["max_workers"]
        == len(cluster["provider"]["worker_ips"])
    )
    for role in ("head", "worker"):
        start = cluster[f"{role}_start_ray_commands"][-1].replace(
            "$RAY_HEAD_IP", "10.0.0.1"
        )
        (words,) = [words for words in commands(start) if "start" in words]
        assert words[0] == "RAY_AUTH_MODE=token"
        ray_understands(words[1:])
    for words in commands_in_comments("ray_cluster.yaml"):
        ray_understands(words)
        if words[1] == "exec":
            for inner in commands(words[-1]):
                if inner[0] != "cd":
                    CHECKS[inner[0]](inner)


def test_the_slurm_script_parses_and_starts_what_exists(
    documentation_workspace: Path,
) -> None:
    script = LAUNCH / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("\\\n", " ")
    starts = re.findall(r'"\$bin/ray" (start .+?) &', text)
    assert len(starts) == 2
    for start in starts:
        ray_understands(
            [
                "ray",
                *shlex.split(
                    re.sub(r'"?\$\w+(:\$port)?"?', "10.0.0.1:6379", start).replace(
                        "--port=10.0.0.1:6379", "--port=6379"
                    )
                ),
            ]
        )
    (given,) = re.findall(r'-m controller.fit "\$@" (.+?) &', text)
    (sbatch,) = commands_in_comments("slurm.sh")
    arguments = sbatch[sbatch.index("examples/launch/slurm.sh") + 1 :]
    dry_run(main, [*arguments, *shlex.split(given.replace("$head:$port", "10.0.0.1:6379"))])
    assert "RAY_AUTH_MODE=token" in text
