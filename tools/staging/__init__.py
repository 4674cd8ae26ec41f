"""The stager: applies the PR stack to the released PyTorch wheel and builds it.

Read in this order; every module only imports the ones before it:

    errors, console      what the user sees
    texts                bytes as text and back
    gitrepo              git with a reproducible identity
    subprocesses         children that end with the stager
    series               torch_patches/series.toml and the patch files
    config               where everything lies
    baseenv              pinned pip environment, checked against its RECORD
    wheelsource          PyTorch source tree recovered from the wheel
    checkout             that tree plus one commit per PR
    codegen              the real torchgen, for the new and changed ops only
    buildgraph, compile  two binaries from the new C++
    farm                 the staged environment: links to the base + our files
    pipeline             setup = all of the above, in order
    placement            where the hunks of one file fit
    apply                the stack onto a real checkout, with git am
    export               edits of the checkout back into patches; verify
    forkserver, testing  test files, each in a process of its own
    prefixes             verify --each
    wheelfile, drift     how the patches fit other releases
    prbody               the body of a pull request
    lint                 linters
    cli                  the command line of tools/stage.py

This package never lands in PyTorch.
"""
