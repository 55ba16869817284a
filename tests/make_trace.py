#!/usr/bin/python3
"""Picks drawn by the measured shares of models/synthetic/routing.json, as a trace for
`hoist bench trace` (format: src/model/trace.h): for each row and layer, the experts picked
are drawn one after another without putting back.
    tests/make_trace.py OUT [steps [rows [seed]]]"""
import json
import sys

import numpy as np

out = sys.argv[1]
steps, rows, seed = (int(v) for v in (sys.argv[2:] + ["2000", "1", "7"][len(sys.argv) - 2:]))
share = np.maximum(np.array(json.load(open("models/synthetic/routing.json")), float), 0.5)
layers, experts = share.shape
rng = np.random.default_rng(seed)
with open(out, "wb") as f:
    f.write(json.dumps({"hoist_trace": 1, "n_layer": layers, "n_expert": experts, "n_active": 8,
                        "moe": list(range(layers))}).encode() + b"\n")
    for _ in range(steps):
        # Who comes first in a race of exponential clocks with these rates is who is drawn first.
        race = rng.exponential(size=(layers, rows, experts)) / share[:, None, :]
        picks = np.argsort(race, axis=2)[:, :, :8].astype("<u2")
        f.write(np.uint16(rows).tobytes() + picks.tobytes())
