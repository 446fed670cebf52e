"""Constants of the cost model, and timings of an ad-hoc benchmark on one H200 in a journal's form, to fit them to.

The benchmark's kernels are older than any sweep's ("earlier", then "before"), but it knows bf16 and batches 4 to 256.
"""
