"""Callbacks for trainers, and one plan for several ranks. Importing this package imports no library.

`huggingface` and `lightning` need transformers and lightning. If one is missing, the error names the extra that
installs it. `ranks` needs only torch. docs/integrations.md lists the combinations that work, each with its test.
"""
