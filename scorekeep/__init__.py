"""What users import and type; knows only the contract and HTTP."""
