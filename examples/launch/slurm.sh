#!/bin/bash
# A run on several nodes of a Slurm cluster: a Ray head on the first node, workers on the others, then the same command.
#
#     sbatch --nodes=8 examples/launch/slurm.sh --config /shared/run.yaml run.dir=/shared/runs run.resume=auto
#
# Ballast is installed on every node at the same path (BALLAST_PYTHON below; requirements/gpu.txt is what it needs, with
# NVIDIA's driver 580.65.06 or later); model, data and run.dir are absolute paths on shared storage. Slurm ends everything
# when the job ends. A run that was stopped goes on: run.resume=auto.
#SBATCH --job-name=ballast
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120 # two minutes before the time limit: the run ends as it does by Ctrl-C
set -euo pipefail

bin=$(dirname "${BALLAST_PYTHON:-$PWD/.venv/bin/python}")
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=$(getent hosts "${nodes[0]}" | awk '{print $1; exit}')
port=6379

# One token for this job alone, which only its processes see.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    "$bin/ray" start --head --block --node-ip-address="$head" --port=$port --disable-usage-stats &
ray_head=$!
until (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; do
    kill -0 $ray_head # ends the script where the head could not start
    sleep 1
done
if [ "${#nodes[@]}" -gt 1 ]; then
    srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --exclude="${nodes[0]}" \
        "$bin/ray" start --block --address="$head:$port" --disable-usage-stats &
fi

# The driver waits for the other nodes by itself: resources.placement_timeout_s.
"$bin/python" -m controller.fit "$@" resources.ray_address="$head:$port" resources.device=cuda \
    resources.placement_timeout_s=600 &
driver=$!
trap 'kill -TERM $driver' TERM
wait $driver || wait $driver # the first returns early where the trap was sprung
