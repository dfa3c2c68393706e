#!/bin/bash
# launcher.sh torchrun|srun RANKS GRACE COMMAND...
#
# Starts a command as processes of one host, with the environment variables of these launchers, and ends
# them as the launchers do:
# - torchrun sends SIGTERM to all processes when it is interrupted or ended, or when one of them fails. It
#   sends SIGKILL after GRACE seconds (torchrun's own number is 30).
# - srun (scancel, and a time limit with --signal) passes SIGUSR1 and SIGTERM on. It sends SIGKILL GRACE
#   seconds after SIGTERM.
set -u
launcher=$1 ranks=$2 grace=$3; shift 3
token=$(head -c 18 /dev/urandom | base64) port=$((20000 + RANDOM % 12000)) pids=() ending=0

signal() { local pid; for pid in "${pids[@]}"; do kill "-$1" "$pid" 2>/dev/null; done; }
alive() { local pid; for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null && return 0; done; return 1; }
end() {
  ((ending)) && return; ending=1
  signal CONT; signal TERM
  for ((i = 0; i < grace * 20; ++i)); do alive || return; sleep 0.05; done
  echo "launcher: killed"; signal KILL
}
trap end TERM
trap 'if [[ $launcher == srun ]]; then signal INT; else end; fi' INT
trap 'if [[ $launcher == srun ]]; then signal USR1; else signal KILL; exit 138; fi' USR1

for ((rank = 0; rank < ranks; ++rank)); do
  if [[ $launcher == torchrun ]]; then
    variables=(RANK=$rank WORLD_SIZE="$ranks" LOCAL_RANK=$rank LOCAL_WORLD_SIZE="$ranks"
               MASTER_ADDR=localhost MASTER_PORT=$port)
  else
    variables=(SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_NTASKS="$ranks"
               SLURM_LOCALID=$rank SLURM_NNODES=1)
  fi
  setsid env BURST_TOKEN="$token" "${variables[@]}" "$@" &
  pids+=($!)
done
first=0
for pid in "${pids[@]}"; do
  while true; do
    wait "$pid"; code=$?
    kill -0 "$pid" 2>/dev/null || break  # else a signal for this script interrupted wait
  done
  ((code != 0 && first == 0)) && { first=$code; [[ $launcher == torchrun ]] && end; }
done
exit "$first"
