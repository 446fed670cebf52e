"""The step kernel on the host: its own source, run in plain Python, a warp of 32 lanes at a time.

`source` loads the kernel's modules with `dsl` and `instructions` in place of the DSL and of `primitives`; `values` says
what a lane's value is, `memory` what an access may do, `launch` runs a grid. Numbers are real, so outputs can be held
to the reference; every access is checked for bounds, alignment, order and bank conflicts, and counted.

`blackwell` runs the kernel of `kernels/sm100` on the same modules: `tensor` stands in for its instructions, and
`ordered` holds accesses to clocks, since its warps meet at mbarriers and at barriers of a part of the CTA.
"""
