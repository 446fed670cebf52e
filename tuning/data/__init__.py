"""Constants of the cost model, and timings of an ad-hoc benchmark on one H200 in a journal's form, to fit them to.

The benchmark's first lines are of kernels older than any sweep's ("earlier", then "before"), many configs of few cells,
bf16 among them. Its last thirty are ours of the peers run in reports/h200, one config a cell: problems without a sweep.
"""
