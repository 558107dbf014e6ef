"""Configuration: YAML files contain values, and schema.py the types. compose.py merges them.

cli.py parses the command line of every script.
"""
