#!/bin/bash
# MASTER_ADDR=node1 PROCESSES=16 HOSTS=node1:8,node2:8 examples/mpirun.sh sd35_medium_ocr prompts_per_step=64
# Open MPI. Without HOSTS and MASTER_ADDR, all processes are on this machine.
mpirun -n "${PROCESSES:-2}" ${HOSTS:+--host "$HOSTS"} ${MASTER_ADDR:+-x MASTER_ADDR} flow-grpo train "$@" --resume auto
