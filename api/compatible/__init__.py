"""Other services' scoring requests and answers, mapped to ours and back."""
