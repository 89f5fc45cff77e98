package verify

// Prompts are what a model is asked by default. The shipped model knows the answers.
var Prompts = []string{
	"The capital of France is", "The capital of Japan is", "The chemical symbol of gold is",
	"2 + 3 =", "An expert worker", "A backbone", "The atomic number of carbon is", "What is the capital of Italy?",
}
