// Run model.torchscript.pt of a bundle in libtorch on the golden inputs, at each of their batch sizes.
//
//     torchscript_main dist/net
#include <torch/script.h>

#include "golden.h"

static const std::map<std::string, torch::ScalarType> types{
    {"F32", torch::kFloat}, {"F64", torch::kDouble}, {"F16", torch::kHalf}, {"I64", torch::kLong},
    {"I32", torch::kInt},   {"I8", torch::kChar},    {"U8", torch::kByte},  {"BOOL", torch::kBool},
};

// The names of the inputs or outputs in the order of the file, from its metadata: {"optimize_export.inputs": "[\"x\"]", …}
static std::vector<std::string> names(const std::string& metadata, const std::string& kind) {
    std::smatch list;
    const std::regex pattern("\"optimize_export\\." + kind + "\":\\s*\"\\[([^\\]]*)\\]");
    if (!std::regex_search(metadata, list, pattern)) throw std::runtime_error("the file has no names of its " + kind);
    const std::string text = list[1];
    static const std::regex name(R"re(\\"([^"\\]+)\\")re");
    std::vector<std::string> found;
    for (std::sregex_iterator each(text.begin(), text.end(), name), end; each != end; ++each)
        found.push_back((*each)[1]);
    return found;
}

int main(int argc, char** argv) try {
    if (argc != 2) throw std::runtime_error("usage: torchscript_main BUNDLE");
    const std::string bundle = argv[1];
    torch::jit::ExtraFilesMap files{{"metadata.json", ""}};
    auto module = torch::jit::load(bundle + "/model.torchscript.pt", torch::kCPU, files);
    const auto input_names = names(files["metadata.json"], "inputs");
    const auto output_names = names(files["metadata.json"], "outputs");
    torch::InferenceMode no_gradients;
    bool ok = true;
    for (auto& [name, call] : read_golden(bundle)) {
        std::vector<torch::IValue> inputs;
        for (auto& input : input_names) {
            auto& tensor = call.inputs.at(input);
            inputs.push_back(torch::from_blob(tensor.bytes.data(), tensor.shape, types.at(tensor.dtype)));
        }
        const auto result = module.forward(inputs);
        // A file with one output returns a tensor, one with several a tuple of tensors.
        const auto outputs = result.isTensor() ? std::vector<torch::IValue>{result} : result.toTupleRef().elements().vec();
        for (size_t i = 0; i < output_names.size(); ++i) {
            const auto& golden = call.outputs.at(output_names[i]);
            const auto output = outputs.at(i).toTensor().contiguous();
            if (output.sizes() != golden.shape)
                throw std::runtime_error(output_names[i] + " has another shape than in the golden data");
            ok &= report(name, output_names[i], error_of(output.data_ptr(), golden));
        }
    }
    return ok ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "torchscript_main: %s\n", error.what());
    return 2;
}
