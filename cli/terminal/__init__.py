"""How a command is declared, what it prints, what is typed, and the exit status it ends with."""
