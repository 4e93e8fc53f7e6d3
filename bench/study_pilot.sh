#!/usr/bin/env bash
# The pilot before the control study: two steps at several budgets, alone, seven at a time by time slices, and under MPS.
#   bash bench/study_pilot.sh    (on a machine with an NVIDIA GPU, from the repository's root)
set -u
export PYTHONPATH=.:${PYTHONPATH:-} OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1
nvidia-smi | head -15; nproc
python -c "
from sparrow.sparse.schedule import Schedule
for b in (64,128,192,256,384,512): Schedule.fixed(b, dense_layers=()).save(f'/tmp/b{b}.json')
import tomllib, tomli_w
c = tomllib.load(open('recipes/sparrow_recipes/configs/study/small.toml','rb'))['train']
c['algorithm']['corrections'] = []
tomli_w.dump(c, open('/tmp/t.toml','wb'))
"
phase() {
  local t0=$(date +%s)
  for b in $2; do
    a="--rollout.attention.schedule=/tmp/b$b.json"; [ $b = 0 ] && a="--rollout.attention.dense=true"
    timeout 100 python -m sparrow train /tmp/t.toml $a --run.dir=/tmp/p/$1-$b --run.steps=$3 --validation.every=$4 --run.save_every=100 > /tmp/p-$1-$b.log 2>&1 &
  done
  wait
  echo "phase $1: $(( $(date +%s) - t0 )) s"
  python - "$1" <<'P'
import json, sys, glob
for f in sorted(glob.glob(f"/tmp/p/{sys.argv[1]}-*/metrics.jsonl")):
    for l in open(f):
        r = json.loads(l)
        print(f.split("/")[3], r["step"], "reward", round(r["critic/score/mean"],3), "len", round(r["response_length/mean"]), "clip", r["response_length/clip_ratio"], "p05min", r.get("sparse/accept_p05_min"), {k.split("/")[1]: round(r[k],2) for k in r if k.startswith("timing")})
P
  tail -n 2 /tmp/p-$1-*.log | cut -c1-300
}
mkdir -p /tmp/p
phase alone "0" 2 0
phase slice "0 64 128 192 256 384 512" 2 0
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mpslog; mkdir -p /tmp/mps /tmp/mpslog
nvidia-cuda-mps-control -d; echo "mps rc $?"; sleep 1
phase mps "0 64 128 192 256 384 512" 2 0
echo quit | nvidia-cuda-mps-control; cat /tmp/mpslog/*.log 2>/dev/null | tail -5
