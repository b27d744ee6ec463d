"""The only package that uses private names of torch, one module per part of torch.

Each access says why it is needed, and either that it is required, or what happens where torch lacks it ("Degraded").
`tests/torch_seam` tests both, and that no other package uses a private name. docs/private-torch.md lists every setting
and every function of torch that is changed.
"""
