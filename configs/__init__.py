"""What a run may be: YAML groups hold the values, schema.py the types, entry.py all the Hydra glue."""
