"""Configuration: YAML files contain the values, schema.py the types. compose.py merges them, cli.py parses commands."""
