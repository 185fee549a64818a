"""Three mistakes, which a type checker finds before anything runs."""

import fp8cfg
from fp8cfg import build
from fp8cfg.recipes import llama_8b

recipe = llama_8b()
recipe.fp8.margn = 1  # error: attr-defined
recipe.fp8.margin = 1
job = build(recipe, modle=3)  # error: call-arg
fp8cfg.no_such_thing()  # error: attr-defined
