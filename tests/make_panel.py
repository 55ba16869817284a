#!/usr/bin/env python3
"""Makes a panel (the JSON that `hoist score --panel` reads) from recorded reference logits.
   tests/make_panel.py MODEL_FOLDER > tests/data/panel/demo_exl3.json
MODEL_FOLDER/reference holds prompts.json and NAME.logits.npy: all positions of short prompts, else the
last few. Row j of an item is the distribution after tokens[: prompt_len + j]."""
import json
import sys

import numpy as np

folder = sys.argv[1] + "/reference/"
panel = []
for p in json.load(open(folder + "prompts.json")):
    logits = np.load(folder + p["name"] + ".logits.npy").astype(np.float64)
    ids = p["ids"]
    first = len(ids) - len(logits)          # row 0 predicts ids[first + 1]
    lse = np.logaddexp.reduce(logits, axis=1)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    panel.append({
        "prompt": p["name"], "prompt_len": first + 1, "tokens": ids, "completion": "",
        "top20_ids": order.tolist(),
        "top20_lp": [[round(float(logits[r, i] - lse[r]), 6) for i in order[r]] for r in range(len(logits))],
    })
json.dump(panel, sys.stdout, separators=(",", ":"))
print()
