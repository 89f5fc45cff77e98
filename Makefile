# Every target works from a plain checkout; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help deps build test test-sdk test-settle settle-deps test-x402 x402-deps test-load test-net test-chaos test-reflink sim sim-scale soak test-vulkan test-arm check lint test-race demo demo-paid bench bench-plan bench-worker bench-hot bench-startup bench-lanes bench-rtt bench-server bench-peers bench-downloads bench-net bench-books bench-gossip equivalence verify-cuda fuzz clean clean-deps

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
GO_FILES    = $(shell find cmd node p2p ring experts market settle ggml -name '*.go' 2>/dev/null)
FUZZTIME   ?= 5s
# All that builds leave out: no file is for their absence, so one look with all of them sees every file.
TAGS        = chaos,load,nettest,phone,reflink,sdk,sim,soak,svm,vulkan
# Folders in which something runs beside something else: what starts no goroutine, in its tests
# either, the race detector has nothing to say of. Of ggml it is asked where several compute.
RACE_DIRS   = $(filter-out ggml,$(shell grep -rlE --include='*.go' '^\s*go [a-z]|\.Go\b' cmd node p2p ring experts market settle ggml | xargs -n1 dirname | sort -u))
RACE_GGML   = ^Test(Slice|ReplaceSlice|SwarmEqualsAlone|ExpertErrorFails|GenerateSameConfig|StageWithRemote|KernelForgets|KernelProgramsAreBounded)
# Long tests of whole daemons, which others run with the race detector too, of what the
# library computes, which the detector does not see, of what a request asks for, which one goroutine
# reads, and of processes that are killed or idle; DepartedPeerStaysAway and SwarmOverGossip run a
# whole network on synctest's clock, whose timers share one context of the detector between threads
# and can crash it (golang/go#78156).
NO_RACE     = ^Test(DepartedPeerStaysAway|HostilePeerOfWorker|HostileWorker|KilledWorkerWithoutReplica|EndOfBackbone|Invitation|CarriedServersLost|CarriedRights|KilledDownload|QuickRestarts|Pause|LyingSources|FullDisk|FetchedBackbone|RingOfBackbones|ParityEveryArchitecture|EveryCut|QuantizedModelsRun|GeneratedModelsRun|GeneratedVariantsRun|ParityQuantised|ArchitecturesThroughWorkers|Damage|Idle|Killed|Kill|SwarmOverGossip|SchemasHold|AnyJSONHolds|ForcedCalls|AnswersAfterReasoning|Forms|FormsCarried|FormsRound|TurnsAreCached|Chat|ChatOfScript|BadModelFiles|WorkerWithAnotherModel|BenchChecksAnswers)$$
NODES      ?= 100
SCALE      ?= 100,1000,10000
SOAK       ?= 5m
GOTESTFLAGS ?=
export BACKEND LLAMA_SRC LLAMA_LIB DEPS_FROM

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## fetch llama.cpp's headers and libraries (BACKEND=vulkan|cuda, or LLAMA_SRC= LLAMA_LIB=)
	@packaging/deps.sh

build: deps ## build bin/kvasird and bin/kvasir
	@mkdir -p bin
	go build -o bin/ ./cmd/kvasird ./cmd/kvasir

# -p 1: packages that compute do not share the cores, or their deadlines lie.
test: deps ## run the tests; needs no root
	packaging/deps_test.sh
	go build ./...
	go test -count=1 -p 1 -timeout 25m $(GOTESTFLAGS) ./...
	@echo "left out: race detector, linters and the build without cgo (make check), fuzzing (make fuzz), a GPU backend (make test-vulkan), a worker on ARM (make test-arm), the official clients (make test-sdk), payments on a local chain (make test-settle, make test-x402, make demo-paid), load (make test-load), NATs and relays (make test-net), benchmarks (make bench)"

check: lint test-race ## format, vet, staticcheck, tidy, build without cgo, tests with the race detector

lint: deps ## format, vet, staticcheck, tidy, build without cgo
	@bad=$$(gofmt -l $(GO_FILES)); [ -z "$$bad" ] || { echo "not formatted (gofmt -w): $$bad"; exit 1; }
	go vet -tags $(TAGS) ./...
	go run $(STATICCHECK) -tags $(TAGS) ./...
	go mod tidy -diff
	CGO_ENABLED=0 go build ./...
	CGO_ENABLED=0 go vet ./...

# make lint has vetted all. Tests run one package at a time, compilers do not.
test-race: deps ## tests with the race detector, of what runs beside something else
	go build -race ./...
	go test -race -vet=off -count=1 -p 1 -timeout 25m -run '$(RACE_GGML)' -skip '$(NO_RACE)' $(GOTESTFLAGS) ./ggml
	go test -race -vet=off -count=1 -p 1 -timeout 25m -skip '$(NO_RACE)' $(GOTESTFLAGS) $(addprefix ./,$(RACE_DIRS))

# npm's packages go to a folder that git ignores, next to what imports them.
test-sdk: deps ## the official OpenAI and Anthropic clients, in Go and JavaScript, against a daemon (Debian: npm)
	cd node/testdata/sdk && npm ci --ignore-scripts --no-audit --no-fund
	go test -tags sdk -count=1 -timeout 10m -run '^Test(OpenAI|Anthropic|JavaScript)' $(GOTESTFLAGS) ./node

settle-deps: ## fetch the local Solana of the payment tests (Debian: npm; x86-64 only)
	cd settle/settletest/svm && npm ci --ignore-scripts --no-audit --no-fund

test-settle: deps settle-deps ## payments and payouts against a local Solana: what is refused, and why
	go test -tags svm -count=1 -timeout 10m $(GOTESTFLAGS) ./settle/... ./node/cashier
	go test -tags svm -count=1 -timeout 10m -run '^Test(PaidNetwork|SettleRefusesToStart)$$' $(GOTESTFLAGS) ./node

x402-deps: settle-deps ## fetch the x402 project's client (Debian: npm)
	cd node/pay/testdata/x402 && npm ci --ignore-scripts --no-audit --no-fund

test-x402: x402-deps ## the x402 project's client pays for answers over HTTP, on a local Solana
	go test -tags svm -count=1 -timeout 10m $(GOTESTFLAGS) ./node/pay

test-load: deps ## 200 clients with 2,000 requests, some slow, hung up or malformed, against a daemon
	go test -tags load -count=1 -timeout 10m -run '^TestLoad$$' -v $(GOTESTFLAGS) ./node

# The tests make network namespaces of their own and leave nothing behind. Those that wait do so at once.
test-net: ## nodes behind NATs, relays and bad lines; needs root (Debian: iproute2 nftables)
	go test -tags nettest -count=1 -timeout 10m -parallel 8 -run '^TestNet' $(GOTESTFLAGS) ./p2p

# It drops packets in a network namespace of its own.
test-chaos: deps ## kills, stops and black holes under requests, of experts and of rings; needs root (Debian: iproute2 nftables)
	unshare -n sh -c 'ip link set lo up && ip link add kv0 type veth peer name kv1 && ip addr add 10.99.0.1/24 dev kv0 && ip link set kv0 up && ip link set kv1 up && \
		go test -tags chaos -count=1 -timeout 18m -run "^Test(Ring)?Chaos$$" -v $(GOTESTFLAGS) ./node'

# A file system of each kind in a file, mounted where only the test sees it.
test-reflink: ## models taken in without a copy on XFS and Btrfs; needs root (Debian: xfsprogs btrfs-progs)
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; mkdir "$$dir/mnt"; \
	for fs in xfs btrfs; do \
		truncate -s 320M "$$dir/$$fs"; mkfs.$$fs -q "$$dir/$$fs"; \
		unshare -m sh -ec 'mount -o loop "$$0/$$1" "$$0/mnt"; KVASIR_REFLINK="$$0/mnt" go test -tags reflink -count=1 -run "^TestReflink$$" -v ./ggml/store' "$$dir" $$fs; \
	done

sim: deps ## NODES nodes (default 100) over the real gossip live through churn, bursts, partitions
	KVASIR_SIM=$(NODES) GOGC=300 go test -tags sim -count=1 -timeout 24h -run '^TestSim$$' -v $(GOTESTFLAGS) ./node

# Sizes in SCALE, one after the other; 10,000 nodes take six minutes or so of a core.
sim-scale: ## the market of SCALE nodes (default 100,1000,10000): gossip a node and second, coverage, evenness, churn
	KVASIR_SCALE=$(SCALE) go test -tags sim -count=1 -timeout 24h -run '^TestScale$$' -v $(GOTESTFLAGS) ./market

soak: deps ## a swarm that has nothing to do for SOAK (default 5m) stays quiet, small and ready
	KVASIR_SOAK=$(SOAK) go test -tags soak -count=1 -timeout 24h -run '^TestSoak$$' -v $(GOTESTFLAGS) ./node

# Mesa's driver computes Vulkan on the CPU where there is no GPU; it wants to be named.
test-vulkan: ## the expert kernel on a Vulkan device (Debian: libvulkan1 and a driver, such as mesa-vulkan-drivers)
	BACKEND=vulkan packaging/deps.sh
	GGML_VK_VISIBLE_DEVICES=$${GGML_VK_VISIBLE_DEVICES-0} go test -tags vulkan -count=1 -v -run OnVulkan ./ggml

# Another machine's kernels run in emulation: the answers are real, the speed is not.
test-arm: deps ## a daemon for ARM serves all experts to one of this machine (Debian: qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross libstdc++6-arm64-cross)
	@set -e; phone=$$(packaging/arm.sh); \
	KVASIR_PHONE="$$phone" go test -tags phone -count=1 -timeout 5m -run '^TestPhone' -v $(GOTESTFLAGS) ./node

demo: build ## a swarm forms itself on this machine and answers three questions
	bin/kvasird demo

demo-paid: deps settle-deps ## a paid swarm on a local Solana: quotes, payments, answers, receipts, claims, and the balances before and after
	go test -tags svm -count=1 -timeout 10m -run '^TestPaidSwarm$$' -v $(GOTESTFLAGS) ./node

bench: build ## measure dispatch, swarm against alone, and the expert kernel
	bin/kvasird bench

bench-worker: build ## tokens/s of an expert worker on every backend here, with the share of the roofline (build/worker.csv, .svg)
	@mkdir -p build
	bin/kvasird bench worker --csv build/worker.csv --svg build/worker.svg

bench-plan: build ## compare what the planner predicts with what runs (within 25 % wanted)
	bin/kvasird bench --only plan

bench-rtt: build ## rings and expert dispatch over lines of 0 to 50 ms, against one machine and against the plan
	bin/kvasird bench --only rtt

bench-hot: build ## what a backbone gains by the experts that it keeps, over 5 ms
	bin/kvasird bench --only hot

bench-startup: build ## until a backbone of an 84 GB model, a stage, a worker's experts are ready (4 GB of disk)
	bin/kvasird bench --only startup

bench-lanes: build ## what a backbone gains by several contexts, 16 streams over 0, 5 and 20 ms
	bin/kvasird bench --only lanes --rounds 6

# It builds llama.cpp's server, once, which takes a quarter of an hour or so.
bench-server: build ## tokens/s through HTTP against llama.cpp's own server (Debian: cmake g++)
	packaging/llama-server.sh
	bin/kvasird bench --only server --server build/llama-server/bin/llama-server

# As bench-server; the measurement itself takes a quarter of an hour.
bench-peers: build ## against llama.cpp's RPC backend and the bound of a round trip for each layer; more workers, bad ones (Debian: cmake g++)
	packaging/llama-server.sh
	bin/kvasird bench --only peers --rounds 2 --server build/llama-server/bin/llama-server --rpc build/llama-server/bin/ggml-rpc-server

bench-downloads: build ## verified downloads from 1, 2 and 4 peers against raw lanes, on loopback and over 200 Mbit/s each
	bin/kvasird bench --only downloads

bench-net: ## measure discovery and round trips across namespaces, delay and loss (as test-net)
	go test -tags nettest -count=1 -timeout 15m -run '^TestFigures$$' -v ./p2p | grep -v -e '^=== ' -e '^ *---'

bench-books: ## measure the books: quotes paid or reserved a second, each on the disk, with 1 thousand and 1 million accounts
	go test ./node/cashier -run '^$$' -bench Books -benchtime 20000x -timeout 20m

# One process holds all nodes, on a simulated network.
bench-gossip: ## measure what gossip costs at rest, repeated and renewed, with NODES nodes (default 100)
	KVASIR_GOSSIP_NODES=$(NODES) go test ./p2p -run '^$$' -bench GossipAtRest -benchtime 1x

# The table that kvasir verify judges by is experts/tolerance/table.txt; what this leaves
# in build/equivalence.txt takes its place where it should.
equivalence: build ## measure this machine's backends against plain Go and each other, the operations and the shipped model
	@mkdir -p build
	bin/kvasird verify --rows 24 --table build/equivalence.txt --json build/equivalence.json --svg build/equivalence.svg

verify-cuda: build ## the same with NVIDIA's backend, on a machine that has one (not measured yet)
	packaging/deps.sh
	BACKEND=cuda packaging/deps.sh
	@bin/kvasird verify --model none --rows 1 --shapes tiny --backends CUDA0 >/dev/null 2>&1 || { echo "verify-cuda: no CUDA device is seen here: kvasir doctor says why" >&2; exit 1; }
	bin/kvasird verify --rows 24 --json build/equivalence-cuda.json --svg build/equivalence-cuda.svg

fuzz: deps ## run each fuzz target for FUZZTIME (default 5s)
	@set -e; for pkg in $$(go list ./...); do \
		for f in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "$$pkg $$f"; \
			go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) -parallel 2 $$pkg; \
		done; \
	done

clean: ## remove what was built
	rm -rf bin build node/testdata/sdk/node_modules settle/settletest/svm/node_modules

clean-deps: ## remove llama.cpp's headers and libraries
	rm -rf ggml/include ggml/lib build/deps
