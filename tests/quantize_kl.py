#!/usr/bin/env python3
"""KL divergence of models from a reference model, over the demo model's reference prompts, in one run.

    quantize_kl.py HOIST REFERENCE MODEL…

Per model: bytes of its safetensors, mean KL(reference || model) in nats over all positions, its
standard error over positions, and how often the best token is the same. REFERENCE/reference/
prompts.json names the prompts (without the image one). Needs numpy."""
import glob
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

hoist, models = sys.argv[1], sys.argv[2:]
prompts = [p for p in json.load(open(models[0] + '/reference/prompts.json')) if p['name'] != 'image']


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def run(model, ids, tmp):
    json.dump(ids, open(tmp + '/ids.json', 'w'))
    subprocess.run([hoist, 'logits', model, '--ids', tmp + '/ids.json', '--out', tmp + '/out.f32'],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return log_softmax(np.fromfile(tmp + '/out.f32', '<f4').reshape(len(ids), -1))


with tempfile.TemporaryDirectory() as tmp:
    kl, same = {m: [] for m in models[1:]}, {m: [] for m in models[1:]}
    for p in prompts:
        want = run(models[0], p['ids'], tmp)
        for m in kl:
            got = run(m, p['ids'], tmp)
            kl[m] += list((np.exp(want) * (want - got)).sum(1))
            same[m] += list(want.argmax(1) == got.argmax(1))
for m in kl:
    size = sum(os.path.getsize(f) for f in glob.glob(m + '/*.safetensors'))
    print('%-40s %10d bytes  KL %.6f +- %.6f  p99 %.5f  same best %.2f %%  (%d positions)' %
          (m, size, np.mean(kl[m]), np.std(kl[m]) / len(kl[m]) ** .5, np.quantile(kl[m], .99),
           100 * np.mean(same[m]), len(kl[m])))
