"""torchtitan: sections of its TOML files, and its Python configurations."""
