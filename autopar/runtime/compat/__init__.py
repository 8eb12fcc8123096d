"""Every private interface of torch that the runtime uses, each function with the version that it was tried on.

`collectives`, `autograd`, `dtensor`, `modules` call them; `hooks` replaces some of them for as long as a context lasts, which
`runtime.patches` enters. tests/runtime/compat tests each. Imports torch only.
"""
