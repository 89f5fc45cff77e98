// The names of the runtime's errors, in the order of their numbers: the package gives
// numbers only.

const transactionErrors = `AccountInUse AccountLoadedTwice AccountNotFound
ProgramAccountNotFound InsufficientFundsForFee InvalidAccountForFee AlreadyProcessed
BlockhashNotFound CallChainTooDeep MissingSignatureForFee InvalidAccountIndex
SignatureFailure InvalidProgramForExecution SanitizeFailure ClusterMaintenance
AccountBorrowOutstanding WouldExceedMaxBlockCostLimit UnsupportedVersion
InvalidWritableAccount WouldExceedMaxAccountCostLimit WouldExceedAccountDataBlockLimit
TooManyAccountLocks AddressLookupTableNotFound InvalidAddressLookupTableOwner
InvalidAddressLookupTableData InvalidAddressLookupTableIndex InvalidRentPayingAccount
WouldExceedMaxVoteCostLimit WouldExceedAccountDataTotalLimit
MaxLoadedAccountsDataSizeExceeded ResanitizationNeeded
InvalidLoadedAccountsDataSizeLimit UnbalancedTransaction ProgramCacheHitMaxLimit
CommitCancelled`.split(/\s+/)

const instructionErrors = `GenericError InvalidArgument InvalidInstructionData
InvalidAccountData AccountDataTooSmall InsufficientFunds IncorrectProgramId
MissingRequiredSignature AccountAlreadyInitialized UninitializedAccount
UnbalancedInstruction ModifiedProgramId ExternalAccountLamportSpend
ExternalAccountDataModified ReadonlyLamportChange ReadonlyDataModified
DuplicateAccountIndex ExecutableModified RentEpochModified NotEnoughAccountKeys
AccountDataSizeChanged AccountNotExecutable AccountBorrowFailed
AccountBorrowOutstanding DuplicateAccountOutOfSync InvalidError ExecutableDataModified
ExecutableLamportChange ExecutableAccountNotRentExempt UnsupportedProgramId CallDepth
MissingAccount ReentrancyNotAllowed MaxSeedLengthExceeded InvalidSeeds InvalidRealloc
ComputationalBudgetExceeded PrivilegeEscalation ProgramEnvironmentSetupFailure
ProgramFailedToComplete ProgramFailedToCompile Immutable IncorrectAuthority
AccountNotRentExempt InvalidAccountOwner ArithmeticOverflow UnsupportedSysvar
IllegalOwner MaxAccountsDataAllocationsExceeded MaxAccountsExceeded
MaxInstructionTraceLengthExceeded BuiltinProgramsMustConsumeComputeUnits
BorshIoError`.split(/\s+/)

// errorJSON gives an error as nodes write it: "BlockhashNotFound", or
// {"InstructionError":[0,{"Custom":1}]}.
export function errorJSON (err) {
  if (typeof err === 'number') return transactionErrors[err] ?? `Unknown${err}`
  switch (err.constructor.name) {
    case 'TransactionErrorInstructionError':
      return { InstructionError: [err.index, instructionErrorJSON(err.err())] }
    case 'TransactionErrorDuplicateInstruction':
      return { DuplicateInstruction: err.index }
    case 'TransactionErrorInsufficientFundsForRent':
      return { InsufficientFundsForRent: { account_index: err.accountIndex } }
  }
  return { ProgramExecutionTemporarilyRestricted: { account_index: err.accountIndex } }
}

function instructionErrorJSON (err) {
  if (typeof err === 'number') return instructionErrors[err] ?? `Unknown${err}`
  return err.constructor.name === 'InstructionErrorCustom' ? { Custom: err.code } : { BorshIoError: err.msg }
}

// lands says whether a transaction with this error is in a block (and pays its fee), or
// is dropped.
export function lands (json) {
  return typeof json === 'object' && ('InstructionError' in json || 'InsufficientFundsForRent' in json)
}

// RPCError is an error that the caller of a method sees.
export class RPCError extends Error {
  constructor (code, message, data) {
    super(message)
    this.code = code
    this.data = data
  }
}
